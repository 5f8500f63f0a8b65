"""Writes JPEG files of all kinds, and the pixels that libjpeg decodes, to `fixtures/pictures/jpegs.tar.gz`. Needs Pillow, NumPy, a C compiler
and libjpeg (Debian: libjpeg-dev):

    python3 tests/pytorch/make_jpegs.py [OPTION OF CC...]

A file is called `<colours>_<sampling factors>_<width>x<height>/<coding>-<scans>-<restart interval>.jpg`. `<folder>.png` has the pixels of all
files of a folder, which are the same for every order of scans. `refused/` has kinds that Lockstep does not decode.
"""

import io
import itertools
import pathlib
import struct
import subprocess
import sys
import tarfile
import tempfile

import numpy as np
from PIL import Image

HERE = pathlib.Path(__file__).parent
# Width, height, and number of MCUs between restart markers.
CASES = [(35, 23, 0), (35, 23, 3), (5, 3, 0), (64, 48, 4)]
SAMPLING = {
    "grey": ["1x1", "2x2"],
    "ycc": ["1x1,1x1,1x1", "2x1,1x1,1x1", "2x2,1x1,1x1", "1x2,1x1,1x1", "4x1,1x1,1x1", "4x2,1x1,1x1", "3x1,1x1,1x1", "1x1,2x2,2x2",
            "1x1,2x1,2x1", "2x2,2x1,2x1", "2x2,2x1,1x1", "2x2,2x2,2x2", "2x1,2x1,1x1", "1x1,2x2,1x1"],
    "rgb": ["1x1,1x1,1x1", "2x2,1x1,1x1"],
    "cmyk": ["1x1,1x1,1x1,1x1", "2x2,1x1,1x1,1x1", "2x2,1x1,1x1,2x2"],
    "ycck": ["1x1,1x1,1x1,1x1", "2x2,1x1,1x1,2x2"],
}


def scan_orders(channels):
    """Returns coding, name and script of each order of scans."""
    components = [str(i) for i in range(channels)]
    if channels == 1:
        return [("b", "one", "-"), ("p", "usual", "-")]
    rest, upper = ",".join(components[1:]), ";".join(f"{i}:1-63:0:0" for i in components)
    each = lambda order: ";".join(f"{i}:0-63:0:0" for i in order)
    refined = ";".join(f"{i}:1-5:0:2;{i}:6-63:0:2;{i}:1-63:2:1;{i}:1-63:1:0" for i in components[::-1])
    return [
        ("b", "one", "-"),
        ("b", "each", each(components)),
        ("b", "reverse", each(components[::-1])),
        ("b", "first_rest", f"0:0-63:0:0;{rest}:0-63:0:0"),
        ("p", "usual", "-"),
        ("p", "each", ";".join(f"{i}:0-0:0:0" for i in components) + ";" + upper),
        ("p", "refined", f"{','.join(components)}:0-0:0:1;{refined};{','.join(components)}:0-0:1:0"),
    ]


def picture(width, height, channels):
    """Returns a smooth picture of strong colours, for which the methods of upsampling chroma differ little."""
    y, x = np.mgrid[0:height, 0:width].astype(float)
    waves = [130 + 100 * np.sin(x / 9 + 1), 120 + 100 * np.cos(y / 8), 128 + 90 * np.sin((x + y) / 13), 60 + 50 * np.sin((x - y) / 11)]
    return np.stack(waves[:channels] if channels > 1 else waves[2:3], -1).clip(0, 255).astype(np.uint8)


def with_head(data, markers, names):
    """Returns the file with these component names and markers: None is JFIF's, a number is Adobe's with this transform."""
    offset = 2
    while data[offset + 1] in (0xE0, 0xEE):
        offset += 2 + struct.unpack(">H", data[offset + 2 : offset + 4])[0]
    data = bytearray(data[offset:])
    frame, scan = data.index(b"\xff\xc0"), data.index(b"\xff\xda")
    for i, name in enumerate(names):
        data[frame + 10 + 3 * i] = data[scan + 5 + 2 * i] = name
    jfif, adobe = b"\xff\xe0\0\x10JFIF\0\1\1\0\0\1\0\1\0\0", b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0"
    return b"\xff\xd8" + b"".join(jfif if marker is None else adobe + bytes([marker]) for marker in markers) + bytes(data)


def files(program):
    def encoded(colours, sampling, script, restart, coding, width, height):
        channels = sampling.count("x")
        command = [program, str(width), str(height), colours, sampling, script, str(restart), coding]
        result = subprocess.run(command, input=picture(width, height, channels).tobytes(), capture_output=True)
        return result.stdout if result.returncode == 0 else None

    for colours, samplings in SAMPLING.items():
        for sampling in samplings:
            for width, height, restart in CASES:
                folder = f"{colours}_{sampling}_{width}x{height}"
                for coding, name, script in scan_orders(sampling.count("x")):
                    # libjpeg refuses MCUs with more than ten blocks, which gives None.
                    if data := encoded(colours, sampling, script, restart, coding, width, height):
                        pixels = Image.open(io.BytesIO(data)).convert("RGB")
                        yield f"{folder}/{coding}-{name}-{restart}.jpg", data, f"{folder}.png", pixels
    # The markers of JFIF and Adobe and the components' names determine the colour space.
    heads = {"none": [], "jfif": [None], "adobe0": [0], "adobe1": [1], "adobe2": [2], "jfif+adobe0": [None, 0], "adobe0+jfif": [0, None]}
    for (head, markers), names in itertools.product(heads.items(), [b"\1\2\3", b"\0\1\2", b"RGB", b"rgb", b"\1\x22\x23", b"\1\2\3\4"]):
        channels = len(names)
        data = encoded("ycc" if channels == 3 else "ycck", ",".join(["1x1"] * channels), "-", 0, "b", 35, 23)
        data = with_head(data, markers, names)
        folder = f"heads_{head}_{names.hex()}"
        yield f"{folder}/b-one-0.jpg", data, f"{folder}.png", Image.open(io.BytesIO(data)).convert("RGB")
    yield "refused/arithmetic.jpg", encoded("ycc", "1x1,1x1,1x1", "-", 0, "a", 35, 23), None, None


def main():
    expected = {}
    with tempfile.TemporaryDirectory() as home, tarfile.open(HERE / "fixtures/pictures/jpegs.tar.gz", "w:gz") as tar:
        program = f"{home}/encode"
        subprocess.run(["cc", "-O1", "-o", program, HERE / "make_jpegs.c", *sys.argv[1:], "-ljpeg"], check=True)

        def put(name, data):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))

        for name, data, picture_name, pixels in files(program):
            put(name, data)
            if picture_name:
                expected.setdefault(picture_name, pixels)
                assert expected[picture_name].tobytes() == pixels.tobytes(), f"{name} has other pixels than the same coefficients in another order of scans"
        for name, pixels in expected.items():
            png = io.BytesIO()
            pixels.save(png, "png", optimize=True)
            put(name, png.getvalue())


if __name__ == "__main__":
    main()
