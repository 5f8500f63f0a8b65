"""Writes the seeds of the fuzz targets: the job files in the README and docs/, messages of every kind, small pictures, and a model file.

    python3 seeds.py FOLDER
"""

import json
import struct
import sys
import zlib
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def to_msgpack(value):
    """Returns a value of JSON's types or bytes as MessagePack (https://github.com/msgpack/msgpack/blob/master/spec.md)."""
    if value is None:
        return b"\xc0"
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        return bytes([value]) if 0 <= value < 128 else b"\xd3" + struct.pack(">q", value)
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, bytes):
        return b"\xc6" + struct.pack(">I", len(value)) + value
    if isinstance(value, str):
        text = value.encode()
        return b"\xdb" + struct.pack(">I", len(text)) + text
    if isinstance(value, list):
        return b"\xdd" + struct.pack(">I", len(value)) + b"".join(map(to_msgpack, value))
    pairs = b"".join(to_msgpack(key) + to_msgpack(item) for key, item in value.items())
    return b"\xdf" + struct.pack(">I", len(value)) + pairs


ATTEMPT = {"job": "01k0000000000000000000000a", "attempt": 1, "fencing_token": "7." + "0123456789abcdef" * 2}
AT = "2026-01-01T00:00:00Z"
# An AttemptEvent (protocol/src/agent/events.rs) of each kind.
EVENTS = [
    {"type": "running", "total_steps": 100, "steps_per_epoch": 10, "start_step": 0, "train_samples": 1000},
    {"type": "metrics", "rank": 0, "columns": [{"name": "loss", "steps": [1, 2], "values": [2.3, 2.2]}]},
    {"type": "log", "rank": 0, "lines": [{"number": 1, "at": AT, "text": "step 1"}]},
    {"type": "rank", "rank": 0, "report": {"status": "training", "step": 1, "epoch": 1, "step_ms": 1.5, "all_reduce_ms": 0.5,
                                           "data_ms": 0.5, "images_per_second": 100.0, "pid": 1, "device": "GPU 0"}},
    {"type": "checkpoint", "epoch": 1, "step": 10, "val_accuracy": 0.5, "val_loss": 1.5, "best": True, "size_bytes": 1000},
    {"type": "checkpoint_removed", "epoch": 1, "step": 10},
    {"type": "evaluation", "epoch": 1, "step": 10, "samples": 100, "accuracy": 0.5, "loss": 1.5, "secs": 0.1},
    {"type": "histograms", "step": 10,
     "layers": [{"name": "conv1.weight", "kind": "weight", "min": -1.0, "max": 1.0, "counts": [1] * 64}]},
    {"type": "network",
     "layers": [{"name": "conv1", "kind": "conv 3x3", "output_shape": [16, 32, 32], "parameters": 432, "time_us": 1.5}], "timed_steps": 5},
    {"type": "precision_fallback", "step": 3, "what": "gradient"},
    {"type": "stopped_early", "step": 3, "why": "validation accuracy has not improved in 2 validations"},
    {"type": "rank_failed", "rank": 0, "step": 3, "reason": "gone", "code": "diverged", "retriable": True, "secondary": False},
    {"type": "ended", "how": "succeeded", "step": 100},
    {"type": "ended", "how": "stopped"},
    {"type": "ended", "how": "failed", "reason": {"code": "rank_killed", "rank": 0, "step": 3, "signal": 9, "words": "gone"}, "retriable": True},
    {"type": "ended", "how": "secondary", "reason": {"code": "rank_killed", "words": "gone"}},
]
SLOT = {"index": 0, "device": "cuda", "name": "NVIDIA H200", "memory_bytes": 1, "uuid": "GPU-0"}
MACHINE = {"hostname": "h", "cpu": "c", "cores": 2, "memory_bytes": 1, "disk_free_bytes": 1, "version": "0", "address": "10.0.0.1",
           "interface": "eth0", "network_id": "boot net"}
SAMPLE = {"at": AT, "cpus": 2.0, "host_cpus": 2, "cpu_utilization": 0.5, "load": 1.0, "memory_used_bytes": 1, "memory_bytes": 2,
          "host_memory_bytes": 2, "disk_used_bytes": 1, "disk_bytes": 2, "disk_read_bytes_per_second": 1,
          "disk_written_bytes_per_second": 1, "network_received_bytes_per_second": 1, "network_sent_bytes_per_second": None,
          "gpus": [{"slot": 0, "utilization": 0.5, "memory_used_bytes": 1, "temperature_celsius": 40.0, "power_watts": None}]}
SPEC = {"name": "a", "data": {"dataset": "d"}, "model": {"arch": "resnet20"}}
START = {"attempt": ATTEMPT, "spec": SPEC, "dataset_path": "/d", "world_size": 2, "ranks": [[0, 0]], "master_addr": "10.0.0.1",
         "master_port": 0, "secret": "ab", "job_dir": None, "resume": "1-10", "network": {"address": "10.0.0.1", "interface": "eth0"},
         "files": {"mark": None, "dataset": None, "pretrained": None}}
ACKNOWLEDGED = {"attempt": ATTEMPT, "source": {"rank": 0}, "records": 3, "watched": True}
# A FromAgent and a ToAgent (protocol/src/agent.rs) of each kind. protocol/tests/seeds.rs checks that they are valid.
FROM_AGENT = [
    {"type": "hello", "protocol": 6, "agent_id": "a", "name": "a", "machine": MACHINE, "slots": [SLOT], "attempts": [ATTEMPT],
     "only_job": None},
    {"type": "heartbeat", "attempts": [ATTEMPT]},
    {"type": "report", "attempt": ATTEMPT, "source": {"rank": 0}, "first": 0, "events": EVENTS},
    {"type": "report", "attempt": ATTEMPT, "source": "agent", "first": 0, "events": []},
    {"type": "reply", "id": 1, "reply": {"Err": "no"}},
    {"type": "reply", "id": 2, "reply": {"Ok": {"type": "progress", "inspected": [1, 2]}}},
    {"type": "reply", "id": 3, "reply": {"Ok": {"type": "files", "there": [True]}}},
    {"type": "sample", **SAMPLE},
    {"type": "findings", "findings": [{"problem": True, "text": "a driver is missing"}]},
    {"type": "ready", "attempt": ATTEMPT, "port": 4000},
    {"type": "leaving", "reason": "stop"},
    {"type": "part", "message": 1, "last": True, "bytes": b"\x81\xa4type\xa9heartbeat"},
]
TO_AGENT = [
    {"type": "welcome", "heartbeat_secs": 2.0, "lease_secs": 30.0, "revoked": [ATTEMPT], "server_lock": None,
     "acknowledged": [ACKNOWLEDGED]},
    {"type": "refused", "reason": "r", "is_temporary": False},
    {"type": "heartbeat_ack"},
    {"type": "ack", **ACKNOWLEDGED},
    {"type": "start", **START},
    {"type": "launch", "attempt": ATTEMPT, "master_port": 4000},
    {"type": "stop", "attempt": ATTEMPT, "reason": "r", "patient": True},
    {"type": "request", "id": 1, "request": {"type": "inspect_dataset", "path": "/x"}},
    {"type": "request", "id": 2, "request": {"type": "inspect_progress", "path": "/x"}},
    {"type": "request", "id": 3, "request": {"type": "has_files", "paths": ["/x"]}},
    {"type": "part", "message": 1, "last": True, "bytes": b"\x81\xa4type\xadheartbeat_ack"},
]


def png():
    """Returns a PNG file of 2 x 2 RGB pixels."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    rows = b"\0\1\2\3\4\5\6" * 2
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 2, 8, 2, 0, 0, 0))
            + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


def model():
    """Returns a safetensors file with one tensor, whose metadata names a ResNet-20."""
    metadata = {"arch": "resnet20", "classes": '["a","b"]', "image_size": "8", "channels": "3", "mean": "[0,0,0]", "std": "[1,1,1]",
             "spec": "{}", "format": "pt"}
    header = {"__metadata__": metadata, "conv1.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + struct.pack("<2f", 1.0, 2.0)


def main(corpus):
    def write(target, name, content):
        folder = corpus / target
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)

    pages = "\n".join(page.read_text() for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
    blocks = [block.split("\n", 1)[1] for block in pages.split("```")[1::2] if block.startswith("toml")]
    for number, text in enumerate(blocks):
        write("job_file", f"page-{number}", text.encode())
    write("job_file", "json", b'{"name":"a","data":{"dataset":"d","validation":0.1},"train":{"epochs":2,"milestones":[1]},"model":{"arch":"resnet20"}}')
    write("job_file", "toml", b'name = "a"\n[data]\ndataset = "d"\nmean = [0.5]\n[train]\nlr = 0.1\nloss_scale = "dynamic"\nmilestones = [1, 2]\n')
    write("fork", "set", b'train.lr=0.1\ntrain.milestones=[1,2]\ndata.mean=[0.5]\nname="b"\ntrain.epochs=null\na.b.c.d=1\n')
    for number, message in enumerate(FROM_AGENT):
        write("frames", f"from-agent-{number}", to_msgpack(message))
    for number, message in enumerate(TO_AGENT):
        write("frames", f"to-agent-{number}", to_msgpack(message))
    for number, event in enumerate(EVENTS):
        write("frames", f"event-{number}", to_msgpack(event))
    write("model_file", "one", model())
    write("picture", "one.png", png())
    pictures = [path for path in (ROOT / "worker").rglob("*") if path.suffix in (".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".tiff")]
    for path in pictures:
        write("picture", path.name, path.read_bytes())
    try:
        from PIL import Image
    except ImportError:
        print("seeds.py: Pillow is missing, so there are no seeds of JPEG, WebP, GIF, BMP and TIFF")
        return
    from io import BytesIO
    ramp = Image.linear_gradient("L").resize((24, 16))
    for kind, options in [("JPEG", {}), ("JPEG", {"progressive": True}), ("WEBP", {}), ("WEBP", {"lossless": True}), ("GIF", {}),
                          ("BMP", {}), ("TIFF", {}), ("TIFF", {"compression": "tiff_lzw"}), ("PNG", {})]:
        for mode in ("L", "RGB", "CMYK", "P", "RGBA", "I;16"):
            out = BytesIO()
            try:
                ramp.convert(mode).save(out, kind, **options)
            except (OSError, ValueError, KeyError):
                continue
            write("picture", f"{kind}-{mode}-{len(options)}-{'-'.join(options)}".replace(";", ""), out.getvalue())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
