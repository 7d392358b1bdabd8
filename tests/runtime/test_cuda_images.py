# SPDX-License-Identifier: AGPL-3.0-only
"""Modules on CUDA devices are loaded once; held without a GPU, by a loader that counts."""

from __future__ import annotations

import threading

import pytest

from spark_py.runtime.cuda_images import Image, load_image, module_load_count

DEVICE = 1000  # no machine has it, so no other test counts there


def test_one_load_for_a_device_and_image() -> None:
    before, loaded = module_load_count(DEVICE), []
    held = [load_image(DEVICE, b"image", lambda data: loaded.append(data) or object()) for _ in range(1000)]
    assert len({id(image) for image in held}) == 1
    assert loaded == [b"image"]
    assert module_load_count(DEVICE) == before + 1
    others = [load_image(DEVICE, b"other image", lambda _: 2), load_image(DEVICE + 1, b"image", lambda _: 3)]
    assert len({id(image) for image in (held[0], *others)}) == 3


def test_a_module_goes_with_its_last_user() -> None:
    first = load_image(DEVICE, b"short-lived", lambda _: "first")
    second = load_image(DEVICE, b"short-lived", lambda _: "second")
    assert second.module == "first"
    del first, second
    assert load_image(DEVICE, b"short-lived", lambda _: "third").module == "third"


def test_a_load_that_fails_is_not_kept() -> None:
    def refuse(_: bytes) -> object:
        raise OSError("the driver refused it")

    before = module_load_count(DEVICE)
    with pytest.raises(OSError, match="refused"):
        load_image(DEVICE, b"damaged", refuse)
    assert module_load_count(DEVICE) == before
    assert load_image(DEVICE, b"damaged", lambda _: "good").module == "good"


def test_threads_that_ask_together_share_one_load() -> None:
    gate, calls = threading.Barrier(8), []
    images: list[Image] = []

    def ask() -> None:
        gate.wait()
        images.append(load_image(DEVICE, b"shared", lambda data: calls.append(data) or object()))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len(images) == 8
    assert len({id(image) for image in images}) == 1
