"""Other formats: dumps of verl in, JSON lines, Parquet and pickles out."""
