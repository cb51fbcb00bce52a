"""Hugging Face directories: start here.

`formats.py` maps config.json to `model.*` and back, by architecture; `fields.py` reads single fields
strictly. `agreement.py` compares a directory with a configuration and finds the architecture that expresses a
model. `names.py` maps tensor names to parts of our parameters. These files need no torch.

`files.py` reads and writes safetensors files by slices; `export.py` writes a whole directory. Weights go into
a decoder through `policy/weights.py`, whatever form they are stored in.
"""
