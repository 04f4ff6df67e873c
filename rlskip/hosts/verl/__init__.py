"""verl: its V0 and V1 trainers, in the launcher process and in the process that trains."""
