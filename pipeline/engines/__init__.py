"""One file an engine, one contract (base.Engine). Imported lazily: each brings its library."""

ENGINES = ("single", "torch", "fairscale")
