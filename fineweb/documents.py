"""Where documents come from: Parquet or text files, local or on the hub."""

import os
import sys
from dataclasses import dataclass
from fnmatch import fnmatch
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from backstage.dataset import END_OF_TEXT
from backstage.errors import UserError, require

CACHE = Path(__file__).resolve().parent / ".cache"
ROWS = 512  # documents in a batch, at most
TEXT = {".txt", ".text", ".md", ".rst"}
NEEDS = "source activate.sh fineweb"


@dataclass
class Batch:
    """Consecutive documents of a file."""

    path: Path
    file: int  # the index of the file in the list of files
    row: int  # the index of the first document in the file
    texts: Any  # a list of strings, or an Arrow array of them
    done: float  # the fraction of the file that is read after this batch


def list_files(dataset, subset, pattern):
    """The files of a dataset: (revision, [{"file": name, "bytes": size}]).

    `dataset` is a local folder or file, whose revision is None, or else the
    name of a dataset on the hub, whose revision is a commit.
    """
    here = Path(dataset)
    if here.is_file():
        revision = None
        found = [(here.name, here.stat().st_size)]
    elif here.is_dir():
        revision = None
        root = here / subset
        found = [(path.relative_to(here).as_posix(), path.stat().st_size)
                 for path in walk(root)
                 if matches(path.relative_to(root).as_posix(), pattern)]
    else:
        revision, found = list_hub(dataset, subset, pattern)
    require(found, f"{dataset} has no files {subset + '/' if subset else ''}"
            f"{pattern}; fix: check --subset and --files")
    files = [{"file": name, "bytes": size} for name, size in sorted(found)]
    for name in (entry["file"] for entry in files):
        require(Path(name).suffix.lower() in TEXT | {".parquet"},
                f"{name} is neither Parquet nor text; fix: choose other "
                "files with --files")
    return revision, files


def walk(folder):
    """Yield the files below a folder, in any order.

    Unlike `rglob`, it raises `OSError` for a folder that may not be read; a
    link that leads nowhere is yielded.
    """
    def fail(error):
        raise error

    for parent, _, names in os.walk(folder, onerror=fail):
        for path in (Path(parent, name) for name in names):
            if path.is_file() or not path.exists():
                yield path


def list_hub(dataset, subset, pattern):
    """The commit and the files, [(name, bytes)], of a dataset on the hub."""
    hub = import_hub()
    try:
        # without a network this fails at once, unlike what follows
        commit = hub.dataset_info(dataset).sha
        tree = hub.list_repo_tree(dataset, subset or None, recursive=True,
                                  revision=commit, repo_type="dataset")
        found = [(item.path, item.size) for item in tree
                 if hasattr(item, "size")]  # a folder has none
    except hub.errors.EntryNotFoundError as error:
        raise UserError(f"{dataset} has no folder {subset} on the hub; "
                        "fix: check --subset") from error
    except Exception as error:
        raise UserError(explain(dataset, error)) from error
    start = len(subset) + 1 if subset else 0
    return commit, [(name, size) for name, size in found
                    if matches(name[start:], pattern)]


def matches(name: str, pattern: str) -> bool:
    """Whether a file is meant: b.PARQUET, too, but not macOS's ._b.parquet."""
    own = not name.rpartition("/")[2].startswith("._")
    return own and fnmatch(name.lower(), pattern.lower())


def import_hub():
    """Import the hub's client, and have it keep its downloads under CACHE."""
    if not {"HF_HOME", "HF_HUB_CACHE"} & os.environ.keys():
        # the home folder may not have enough space
        os.environ["HF_HUB_CACHE"] = str(CACHE / "hub")
    try:
        import huggingface_hub
        import huggingface_hub.errors
    except ImportError as error:
        raise UserError(
            f"the hub's client is missing; fix: {NEEDS}") from error
    return huggingface_hub


def explain(dataset, error):
    """One line that explains an error of the hub's client."""
    if type(error).__name__ in ("RepositoryNotFoundError",
                                "HFValidationError"):
        return (f"{dataset}: there is no such file or folder here, and no "
                "such dataset on the hub that you may read")
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{dataset}: the hub cannot be reached, or refused ({first})"


def fetch(dataset, revision, name):
    """The path of one of a dataset's files, downloaded if necessary.

    An interrupted download is continued. A file that is already there is
    not downloaded again, and needs no network.
    """
    if revision is None:
        here = Path(dataset)
        return here if here.is_file() else here / name
    hub = import_hub()
    if not sys.stderr.isatty():  # then the hub's client shows no bar
        print(f"fetching {name}", file=sys.stderr, flush=True)
    try:
        return Path(hub.hf_hub_download(dataset, name, repo_type="dataset",
                                        revision=revision))
    except Exception as error:
        raise UserError(explain(dataset, error)) from error


def fetch_all(dataset, revision, names):
    """Yield the path of each file, while the next one is being fetched."""
    # its threads are daemons: if we fail, nothing waits for a download
    pool = ThreadPool(1)
    paths = [pool.apply_async(fetch, (dataset, revision, names[0]))]
    for name in names[1:]:
        path = paths.pop().get()
        paths.append(pool.apply_async(fetch, (dataset, revision, name)))
        yield path
    yield paths.pop().get()


def read(path, file, row, column):
    """Yield a file's documents, one `Batch` after another, from `row` on."""
    if path.suffix.lower() in TEXT:
        return read_text(path, file, row)
    return read_parquet(path, file, row, column)


def read_parquet(path, file, row, column):
    """Each row is a document. Only the text column is read."""
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise UserError(f"pyarrow is missing; fix: {NEEDS}") from error
    # the hub's client would give a link to it anew, not what it leads to
    damaged = (f"{path.resolve()} is not a Parquet file, or is corrupt; fix: "
               "replace it, or delete it if it was downloaded")
    try:
        # pre_buffer would keep everything that has been read
        table = parquet.ParquetFile(path, pre_buffer=False,
                                    buffer_size=1 << 20)
    except arrow.ArrowException as error:
        raise UserError(f"{damaged} ({first_line(error)})") from error
    schema = table.schema_arrow
    require(column in schema.names, f"{path} has no column {column!r}; "
            f"fix: choose one of {', '.join(schema.names)}")
    require(schema.names.count(column) == 1, f"{path} has several columns "
            f"{column!r}, so it is unknown which one is meant")
    kind = schema.field(column).type
    kinds = "is_string", "is_large_string", "is_string_view"  # pyarrow 16's
    require(any(getattr(arrow.types, name)(kind) for name in kinds
                if hasattr(arrow.types, name)),
            f"{path}: the column {column!r} holds {kind}, not text")
    sizes = [table.metadata.row_group(i).num_rows
             for i in range(table.num_row_groups)]
    total = sum(sizes)
    at = group = 0
    while group < len(sizes) and at + sizes[group] <= row:
        at += sizes[group]
        group += 1
    batches = table.iter_batches(
        ROWS, row_groups=range(group, len(sizes)), columns=[column],
        use_threads=False)
    while True:
        try:
            batch = next(batches, None)
        except (arrow.ArrowException, OSError) as error:
            raise UserError(f"{damaged} ({first_line(error)})") from error
        if batch is None:
            break
        texts = batch.column(0)[max(0, row - at):]
        at += batch.num_rows
        if len(texts):
            yield Batch(path, file, at - len(texts), texts, at / total)
    require(at == total, f"{damaged} ({at:,} of {total:,} rows)")


def read_text(path, file, row):
    """A document ends at a line `<|endoftext|>`, or at the end of the file.

    A document of nothing but blanks is left out.
    """
    total = path.stat().st_size
    texts, size, at, first = [], 0, 0, row
    for n, (start, text) in enumerate(split_text(path)):
        if n < row:
            continue
        try:
            texts.append(text.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: byte {start + error.start:,} is not "
                            "UTF-8; fix: convert the file, or leave it out"
                            ) from error
        size += len(text)
        at = start + len(text)
        if len(texts) == ROWS or size > 1 << 22:
            yield Batch(path, file, first, texts, at / total)
            texts, size, first = [], 0, n + 1
    if texts:
        yield Batch(path, file, first, texts, 1)


def split_text(path):
    """Yield (first byte, bytes) of each document in a text file."""
    at, start, lines = 0, 0, []
    with open(path, "rb") as file:
        for line in file:
            at += len(line)
            if line.strip() != END_OF_TEXT.encode():
                lines.append(line)
                continue
            if (text := b"".join(lines)).strip():
                yield start, text
            start, lines = at, []
    if (text := b"".join(lines)).strip():
        yield start, text


def first_line(error):
    return str(error).strip().splitlines()[0]
