"""One file an engine, one contract (base.Engine): single, fairscale, torch. Imported lazily: each brings its library."""

ENGINES = ("single", "torch", "fairscale")
