"""Images wider than a real drafter's window, up to a full-size photo: bounded time and memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from PIL import Image
from support_oracle import endless
from support_prompts import BundleMaker, image, lay_out, text

from dflash_onnx.runtime import Model
from dflash_onnx.runtime.drafters.policy import HolePolicy
from dflash_onnx.runtime.options import make_options

# 47,000 patches: one attention matrix of them would take 8.8 GB.
MOST_MIB = 1000
SCRIPT = """
import json, resource, sys, time
from dflash_onnx.runtime import load
from PIL import Image

photo = Image.radial_gradient("L").resize((4000, 3000)).convert("RGB")
model = load(sys.argv[1])

def peak():
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    # Not ru_maxrss: on Linux a new process starts with its parent's, however large that is.
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

report = {"before_mib": peak()}
started = time.perf_counter()
result = model.generate("Read", [photo], holes=sys.argv[2], max_new_tokens=24).result()
report["seconds"] = time.perf_counter() - started
report["peak_mib"] = peak()
report["vision_seconds"] = result.timings.vision_seconds
report["rows"] = result.prompt_tokens
report["draft"] = result.to_json()["draft"]
plain = model.generate("Read", [photo], draft="none", max_new_tokens=24).result()
report["same"] = plain.token_ids == result.token_ids
print(json.dumps(report))
"""
TARGET = {
    "layers": 3,
    "heads": 2,
    "kv_heads": 1,
    "vision_depth": 1,
    "vision_heads": 1,
    "vision_hidden": 16,
    "deepstack": (0,),
    "context": 16384,
    "max_pixels": 16_777_216,
}


@pytest.fixture(scope="module")
def windowed(make_bundle: BundleMaker) -> Model:
    return endless(Model(make_bundle({"context": 16384}, [{"sliding_window": 64}])))


@pytest.mark.parametrize("policy", HolePolicy, ids=lambda p: p.value)
@pytest.mark.parametrize("before", [0, 3000])
def test_image_wider_than_the_window(windowed: Model, policy: HolePolicy, before: int) -> None:
    """1457 rows behind 3k tokens, or first of all, filled the draft cache (llama.cpp#28587)."""
    parts = [text(before)] * bool(before) + [image(31, 47), text(66)]
    options, found = make_options(max_new_tokens=12), []
    for choice in ({"draft": "none"}, {"holes": policy.value}):
        conversation = windowed.conversation(**choice)
        generation = conversation.generate_plan(lay_out(windowed, parts), options)
        found.append(generation.result())
    plain, drafted = found
    assert drafted.token_ids == plain.token_ids and drafted.draft.state == "on"
    assert drafted.draft.drafted > 0 and drafted.draft.seeded_rows <= 63
    holes = ((before, before + 47),) if policy.ruler == "text" else ()
    assert drafted.draft.holes == holes


def test_what_an_image_costs(make_bundle: BundleMaker) -> None:
    """One 1000x1500 image: 1457 rows but 47 positions, the -1410 of llama.cpp#28715."""
    model = Model(make_bundle({"context": 16384, "max_pixels": 16_777_216}))
    plan = model.plan("Read", [Image.new("RGB", (1000, 1500))])
    span = next(s for s in plan.spans if s.kind == "image")
    positions = plan.mrope_positions[0]
    assert (span.num_rows, span.pinned) == (1457, True)
    assert positions[span.stop] - positions[span.start] == 47


@pytest.mark.parametrize("holes", ["seed", "index"])
def test_full_size_photo(make_bundle: BundleMaker, holes: str) -> None:
    """A 4000x3000 photo with a window-2048 drafter was a 500 (llama.cpp#28587; thread 1)."""
    pytest.importorskip("resource", reason="peak memory is read with getrusage")
    bundle = make_bundle(TARGET, [{"sliding_window": 2048}])
    command = [sys.executable, "-c", SCRIPT, str(bundle), holes]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    print(report)
    assert report["rows"] > 125 * 94 and report["same"]
    assert report["draft"]["state"] == "on" and report["draft"]["drafted"] > 0
    assert report["draft"]["seeded_rows"] == (125 if holes == "seed" else 0)
    assert report["peak_mib"] < MOST_MIB
