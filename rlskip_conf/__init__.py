"""Option files; a package, because Hydra finds configs through imports (pkg://)."""
