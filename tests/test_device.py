"""What conf.device finds: without drivers at once, else by asking torch in a child, once."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import conf.device
from conf.device import Device, find_device


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """A machine with /dev/nvidia0, whose torch answers what the test says; counts how often it was asked."""
    asked = []
    answer = {"kind": "cuda", "name": "NVIDIA H200", "count": 2, "memory_bytes": 150_000_000_000, "bfloat16": True}
    child = subprocess.CompletedProcess([], 0, stdout=json.dumps(answer) + "\n")
    monkeypatch.setattr(conf.device.glob, "glob", lambda pattern: ["/dev/nvidia0"] if "nvidia" in pattern else [])
    monkeypatch.setattr(conf.device, "CACHE", tmp_path / "cache" / "device.json")
    monkeypatch.setattr(conf.device.subprocess, "run", lambda *args, **kwargs: asked.append(args) or child)
    find_device.cache_clear()
    yield asked, child
    find_device.cache_clear()


def test_the_device_is_asked_once_and_again_when_something_changes(driver, monkeypatch):
    asked, _ = driver
    expected = Device("cuda", "NVIDIA H200", 2, 150_000_000_000, True)
    for _ in range(2):
        find_device.cache_clear()  # as a new process
        assert find_device() == expected
    assert len(asked) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    find_device.cache_clear()
    assert find_device() == expected and len(asked) == 2
    conf.device.CACHE.write_text("not json")
    find_device.cache_clear()
    assert find_device() == expected and len(asked) == 3


def test_a_broken_driver_is_cpu_and_not_remembered(driver):
    asked, child = driver
    child.returncode = 1
    for _ in range(2):
        find_device.cache_clear()
        assert find_device() == Device("cpu")
    assert len(asked) == 2


def test_the_question_put_to_torch_is_one_that_it_answers():
    child = subprocess.run([sys.executable, "-c", conf.device.ASK_TORCH], capture_output=True, text=True, timeout=120)
    assert child.returncode == 0, child.stderr
    assert Device(**json.loads(child.stdout)).kind in ("cpu", "cuda")


def test_no_accelerator_is_told_without_asking(monkeypatch):
    monkeypatch.setattr(conf.device.glob, "glob", lambda pattern: [])
    find_device.cache_clear()
    assert find_device() == Device("cpu")
    find_device.cache_clear()


def test_the_machine_is_at_least_something():
    assert conf.device.num_cores() >= 1
    assert conf.device.memory_bytes() > 2**28
