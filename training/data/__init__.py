"""The corpus and its batches: tokenised once into memory maps; the batch is arithmetic in (seed, consumed samples).

files.py       which files a path means, reading them in blocks, their hashes
readers.py     from files to documents: text, jsonl, parquet, Hugging Face datasets
tokenizers.py  bytes, a BPE trained here, any tokenizer.json
pieces.py      documents -> tokens, in parts, by several processes, kept when a kill comes between
split.py       which documents are held out; the two files of tokens
stored.py      tokens that are stored already: another tool's .bin file
synthetic.py   a random stream whose entropy is known
prepare.py     all of it once, into the cache
corpus.py      where the tokens are, as plain JSON
batches.py     which tokens sample i of the run is
"""

from training.data.batches import Batches, permute
from training.data.corpus import Corpus
from training.data.prepare import prepare
from training.data.synthetic import synthetic_chain

__all__ = ["Batches", "Corpus", "permute", "prepare", "synthetic_chain"]
