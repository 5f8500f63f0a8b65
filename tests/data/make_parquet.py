"""Writes small Parquet files of pictures to `parquet/`, and their expected rows to `parquet/expected.json`. Needs the
Python packages datasets, pyarrow, numpy and Pillow:

    python3 tests/data/make_parquet.py
"""

import io
import json
import pathlib
import shutil

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from make_shards import picture

HERE = pathlib.Path(__file__).parent / "parquet"
NAMES = ["cat", "dog", "fox"]
FEATURES = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)})


def png(number):
    buffer = io.BytesIO()
    picture(number).save(buffer, "PNG")
    return buffer.getvalue()


def add_expected(expected, split, row, label, number):
    """Adds a row: split, index, label, and the mean of each channel of picture `number`."""
    mean = np.asarray(picture(number), dtype=np.float64).mean(axis=(0, 1)).tolist()
    expected.append({"split": split, "row": row, "label": label, "mean": mean})


def hub():
    """Writes `data/<split>-<number>-of-<count>.parquet`, as `datasets` uploads a dataset to its hub."""
    expected = []
    (HERE / "hub/data").mkdir(parents=True)
    files = [("train", 0, 2, range(0, 5)), ("train", 1, 2, range(5, 9)), ("validation", 0, 1, range(9, 12))]
    for split, part, parts, numbers in files:
        rows = {
            "image": [{"bytes": png(number), "path": f"{number}.png"} for number in numbers],
            "label": [number % 3 for number in numbers],
        }
        table = datasets.table.InMemoryTable(pa.Table.from_pydict(rows, schema=FEATURES.arrow_schema))
        info = datasets.DatasetInfo(features=FEATURES)
        # Without this fingerprint, `datasets` would choose a random one.
        datasets.Dataset(table, info=info, fingerprint=f"{split}-{part}").to_parquet(HERE / f"hub/data/{split}-{part:05}-of-{parts:05}.parquet")
        for row, number in enumerate(numbers):
            add_expected(expected, split, row, NAMES[number % 3], number)
    return expected


def plain():
    """Writes columns of bytes and text with each codec that Lockstep reads, in row groups of 16 and pages of about four pictures."""
    expected = []
    (HERE / "plain").mkdir()
    for codec in ["none", "snappy", "gzip", "zstd"]:
        rows = {
            "id": pa.array(range(40), pa.int64()),
            # The name of the column does not have to match the format of the pictures.
            "jpg": pa.array([png(number) for number in range(40)], pa.binary()),
            "label": pa.array([NAMES[number % 3] for number in range(40)], pa.string()),
        }
        options = {"row_group_size": 16, "data_page_size": 1000, "write_batch_size": 1, "compression": codec}
        if codec == "zstd":
            options |= {"data_page_version": "2.0", "write_page_index": True, "use_dictionary": ["label"]}
        if codec == "gzip":
            options |= {"use_dictionary": False, "column_encoding": {"jpg": "DELTA_LENGTH_BYTE_ARRAY"}}
        pq.write_table(pa.table(rows), HERE / f"plain/train-{codec}.parquet", **options)
    for row in range(40):
        add_expected(expected, "train", row, NAMES[row % 3], row)
    return expected


def odd():
    """Writes a file with rows that cannot be read, a file with checksums, and files that are refused."""
    (HERE / "odd").mkdir()
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])

    def write(name, columns, **options):
        pq.write_table(pa.table(columns), HERE / f"odd/{name}.parquet", **options)

    rows = [{"bytes": png(0), "path": None}, None, {"bytes": None, "path": "1.png"}, {"bytes": b"text", "path": "x"}]
    rows += [{"bytes": png(number), "path": None} for number in (4, 5, 6)]
    labels = pa.array([0, 1, 2, 1, None, -1, 2], pa.int8())
    write("rows", {"image": pa.array(rows, image), "label": labels})
    columns = {"jpg": pa.array([png(number) for number in range(8)], pa.binary()), "label": pa.array(range(8), pa.int8())}
    write("checksums", columns, write_page_checksum=True, compression="none", use_dictionary=False, write_statistics=False)
    pictures = pa.array([png(0)], pa.binary())
    write("no-label", {"image": pictures, "id": [1], "caption": ["a cat"]})
    write("no-picture", {"url": ["http://localhost/1.png"], "label": [0], "tags": [["a", "b"]]})
    write("two-pictures", {"left": pictures, "right": pictures, "label": [0]})
    write("brotli", {"image": pictures, "label": [0]}, compression="brotli")


if __name__ == "__main__":
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir()
    expected = {"hub": hub(), "plain": plain()}
    odd()
    (HERE / "expected.json").write_text(json.dumps(expected) + "\n")
