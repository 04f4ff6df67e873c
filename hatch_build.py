"""What the built distributions say of themselves: README for an index page, and the project's URLs.

README's links are relative, as a checkout needs them, and lead nowhere on an index page. With
``RLSKIP_HOME`` (https://HOST/OWNER/rlskip) they lead to that repository, at this version. Without
it only their text is left, and pictures are left out.
"""

import os
import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+://)([^)]*)\)")


def for_an_index(readme: str, home: str, version: str) -> str:
    """`readme` (Markdown) without relative links."""

    def absolute(link: re.Match[str]) -> str:
        picture, text, path = link.groups()
        if path.startswith("#"):
            return link[0]
        if home:
            kind = "raw" if picture else "blob"
            return f"{picture}[{text}]({home}/{kind}/v{version}/{path})"
        return "" if picture else text

    return LINK.sub(absolute, readme)


class Metadata(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        home = os.environ.get("RLSKIP_HOME", "").rstrip("/")
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = for_an_index(text, home, metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        if home:
            places = {"Source": "", "Documentation": "/tree/main/docs", "Issues": "/issues"}
            places["Changelog"] = "/blob/main/CHANGELOG.md"
            metadata["urls"] = {name: home + path for name, path in places.items()}
