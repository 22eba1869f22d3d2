"""The configuration: one dataclass schema (schema.py), values in yaml, and what `null` resolves to (resolve.py)."""
