"""A run's model for Hugging Face's transformers: python -m workshop export"""

import shutil
from pathlib import Path

from backstage import vocabulary
from backstage.checkpoint import find_checkpoint, load_checkpoint
from backstage.huggingface import write_folder


def main(run, folder):
    """Write the newest checkpoint of a run; the folder must be new.

    The vocabulary is written beside it as ours, for `code/generate.py`, if it
    is not GPT-2's, which transformers has.
    """
    file, folder = find_checkpoint(run), Path(folder)
    state = load_checkpoint(file)
    write_folder(folder, state["config"], state["model"])
    for name in (vocabulary.TOKENS, vocabulary.SETTINGS):
        source = Path(state["hyperparameters"]["data"], name)
        if source.exists():
            shutil.copy(source, folder / name)
    print(f"{file} is in {folder}: "
          f"GPT2LMHeadModel.from_pretrained({str(folder)!r})")
