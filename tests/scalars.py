"""`python scalars.py FOLDER`: every scalar of the TensorBoard logs below it, as JSON."""

import json
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

found = {}
for file in sorted(Path(sys.argv[1]).rglob("events.out.tfevents.*")):
    events = EventAccumulator(str(file)).Reload()
    for tag in events.Tags()["scalars"]:
        found.setdefault(tag, []).extend(event.value for event in events.Scalars(tag))
print(json.dumps(found))
