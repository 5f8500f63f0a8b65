"""Writes pictures, decoded by Pillow and transformed by torchvision, to `fixtures/pictures/`. Needs torch, torchvision and Pillow:

    python3 tests/pytorch/make_pictures.py

`decoding/` has files of many kinds, and `<name>.rgb.png` with the pixels that
`ImageOps.exif_transpose(Image.open(file)).convert("RGB")` gives. `transforms/` has synthetic photographs, and the results
of torchvision's transforms with the parameters in `transforms.json`.
"""

import io
import json
import pathlib
import struct
import zlib

import numpy as np
import torch
import torchvision
import torchvision.transforms.functional as F
from PIL import Image, ImageOps
from torchvision.transforms import InterpolationMode
from torchvision.transforms.autoaugment import _apply_op

HERE = pathlib.Path(__file__).parent / "fixtures" / "pictures"


def photograph(width, height, seed=1):
    """Returns a synthetic photograph with gradients, edges, texture and noise."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    picture = np.stack([110 + 90 * np.sin(x / 37 + y / 61), 120 + 80 * np.cos(x / 53 - y / 29), 100 + 100 * (y / height)], -1)
    for _ in range(14):
        cx, cy, r = random.uniform(0, width), random.uniform(0, height), random.uniform(4, min(width, height) / 4)
        inside = ((x - cx) ** 2 + (y - cy) ** 2 < r * r)[..., None]
        picture = np.where(inside, 0.3 * picture + 0.7 * random.uniform(0, 255, 3), picture)
    stripes = (np.sin(x * 0.9) > 0.3)[..., None] & (y > 0.8 * height)[..., None]
    picture = np.where(stripes, 255 - picture, picture)
    return Image.fromarray(np.clip(picture + random.normal(0, 3, picture.shape), 0, 255).astype(np.uint8))


def decoding():
    home = HERE / "decoding"
    home.mkdir(parents=True, exist_ok=True)
    picture = photograph(27, 18)

    def put(name, data, expected=None):
        (home / name).write_bytes(data)
        rgb = expected or ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
        rgb.save(home / f"{name}.rgb.png", optimize=True)

    def encoded(image, kind, **options):
        out = io.BytesIO()
        image.save(out, kind, **options)
        return out.getvalue()

    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        put(f"orientation-{orientation}.jpg", encoded(picture, "jpeg", quality=92, exif=exif))
    exif = Image.Exif()
    exif[0x0112] = 6
    put("orientation-6.png", encoded(picture, "png", exif=exif))
    put("orientation-6.webp", encoded(picture, "webp", lossless=True, exif=exif))
    put("orientation-6.tiff", encoded(picture, "tiff", tiffinfo={0x0112: 6}))
    put("progressive.jpg", encoded(picture, "jpeg", quality=90, progressive=True))
    put("full-chroma.jpg", encoded(picture, "jpeg", quality=90, subsampling=0))
    put("half-chroma.jpg", encoded(picture, "jpeg", quality=90, subsampling=1))
    put("grey.jpg", encoded(picture.convert("L"), "jpeg", quality=90))
    cmyk = picture.convert("CMYK")
    black = Image.fromarray((np.mgrid[0:18, 0:27][1] * 5).astype(np.uint8))
    cmyk = Image.merge("CMYK", [*cmyk.split()[:3], black])
    plain = encoded(cmyk, "jpeg", quality=95)
    put("cmyk.jpg", plain)
    # The same components, declared as YCCK by Adobe's marker (APP14).
    ycck = bytearray(plain)
    ycck[plain.index(b"Adobe") + 11] = 2
    put("ycck.jpg", bytes(ycck))
    array = np.asarray(picture)
    put("palette.png", encoded(picture.quantize(16), "png"))
    put("palette-transparent.png", encoded(picture.quantize(16), "png", transparency=3))
    put("grey.png", encoded(picture.convert("L"), "png"))
    put("one-bit.png", encoded(picture.convert("1"), "png"))
    put("grey-alpha.png", encoded(Image.merge("LA", [picture.convert("L"), black]), "png"))
    put("alpha.png", encoded(Image.merge("RGBA", [*picture.split(), black]), "png"))
    put("alpha.webp", encoded(Image.merge("RGBA", [*picture.split(), black]), "webp", lossless=True, exact=True))
    put("lossy.webp", encoded(picture, "webp", quality=90))
    put("palette.gif", encoded(picture.quantize(16), "gif"))
    put("transparent.gif", encoded(picture.quantize(16), "gif", transparency=3))
    put("plain.bmp", encoded(picture, "bmp"))
    put("palette.bmp", encoded(picture.quantize(16), "bmp"))
    put("plain.tiff", encoded(picture, "tiff", compression="tiff_lzw"))
    put("cmyk.tiff", encoded(cmyk, "tiff", compression="tiff_lzw"))

    def png16(samples, kind):
        height, width = samples.shape[:2]
        rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in samples)
        chunk = lambda name, data: struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        head = struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0)
        return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")

    wide = array.astype(np.uint16) * 257 - (array > 0) * 200
    put("rgb-16.png", png16(wide, 2))
    alpha = np.asarray(black).astype(np.uint16)[..., None] * 257
    put("rgba-16.png", png16(np.concatenate([wide, alpha], -1), 6))
    # Pillow clips 16-bit grey at 255, so the expected pixels are the upper 8 bits.
    grey = wide[..., 1:2]
    upper = Image.fromarray((grey[..., 0] >> 8).astype(np.uint8)).convert("RGB")
    put("grey-16.png", png16(grey, 0), upper)
    put("grey-alpha-16.png", png16(np.concatenate([grey, alpha], -1), 4))


def transforms():
    home = HERE / "transforms"
    home.mkdir(parents=True, exist_ok=True)
    picture = photograph(96, 64, 2)
    tall = photograph(40, 90, 3)
    small = photograph(24, 20, 4)
    square = photograph(24, 24, 5)
    sources = {"wide": picture, "tall": tall, "small": small, "square": square}
    for name, image in sources.items():
        image.save(home / f"{name}.png", optimize=True)
    square.convert("L").save(home / "grey.png", optimize=True)
    sources["grey"] = square.convert("L")
    recorded = []

    def put(source, transform, image):
        name = f"{len(recorded):03}.png"
        image.save(home / name, optimize=True)
        recorded.append({"of": source, "file": name, **transform})

    for source, top, left, height, width, side in [
        ("wide", 0, 0, 64, 96, 40), ("wide", 13, 21, 41, 60, 32), ("wide", 50, 3, 10, 12, 40), ("wide", 20, 20, 32, 32, 32),
        ("tall", 7, 3, 77, 33, 32), ("tall", 60, 0, 30, 40, 40), ("small", 3, 2, 15, 19, 40), ("small", 0, 0, 1, 1, 16),
        ("grey", 2, 3, 20, 17, 32),
    ]:
        result = F.resized_crop(sources[source], top, left, height, width, [side, side], InterpolationMode.BILINEAR)
        put(source, {"resized_crop": [top, left, height, width], "side": side}, result)
    for source, resize, side in [("wide", 40, 35), ("wide", 37, 32), ("tall", 36, 32), ("tall", 48, 40), ("small", 45, 40),
                             ("square", 24, 21), ("square", 37, 32), ("grey", 36, 32)]:
        result = F.center_crop(F.resize(sources[source], resize, InterpolationMode.BILINEAR), side)
        put(source, {"resize": resize, "side": side}, result)

    nearest = InterpolationMode.NEAREST
    for source in ["square", "grey"]:
        image = sources[source]
        ops = [(name, strength) for name, strengths in {
            "ShearX": [0.3, -0.99], "ShearY": [0.132, -0.6], "TranslateX": [9.6, -16.0], "TranslateY": [11.75, -4.0],
            "Rotate": [30.0, -4.5, 135.0, 90.0], "Brightness": [0.9, -0.6], "Color": [0.99, -0.45], "Contrast": [0.27, -0.9],
            "Sharpness": [0.9, -0.9], "Posterize": [2, 7], "Solarize": [178.5, 0.0, 255.0], "AutoContrast": [0.0],
            "Equalize": [0.0],
        }.items() for strength in strengths]
        if source == "grey":
            ops = [(name, strength) for name, strength in ops if name in ("ShearX", "Color", "Contrast", "Sharpness", "Equalize")]
        for name, strength in ops:
            put(source, {"op": name, "strength": strength, "side": 24}, _apply_op(image, name, strength, nearest, None))
        for turns in [0.1, -0.37, 0.5]:
            put(source, {"op": "Hue", "strength": turns, "side": 24}, F.adjust_hue(image, turns))
    # A picture with few values tests the limits of Equalize and AutoContrast.
    flat = Image.fromarray((np.asarray(square) // 64 * 20 + 60).astype(np.uint8))
    flat.save(home / "flat.png", optimize=True)
    for name in ["AutoContrast", "Equalize"]:
        put("flat", {"op": name, "strength": 0.0, "side": 24}, _apply_op(flat, name, 0.0, nearest, None))
    versions = {"torchvision": torchvision.__version__, "pillow": Image.__version__, "torch": torch.__version__}
    (home / "transforms.json").write_text(json.dumps({"made_by": versions, "cases": recorded}, indent=0) + "\n")


if __name__ == "__main__":
    decoding()
    transforms()
