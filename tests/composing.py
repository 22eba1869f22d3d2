"""Configurations composed by Hydra and resolved as on the reference machine: two cores, no accelerator."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from conf.device import Device
from conf.resolve import resolve
from conf.schema import RootConfig, register

CONF = Path(__file__).parent.parent / "conf"
CPU = Device("cpu")


def composed(*overrides: str) -> RootConfig:
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return OmegaConf.to_object(compose("config", list(overrides)))


def resolved(*overrides: str, device: Device = CPU) -> RootConfig:
    config = composed(*overrides)
    with mock.patch("conf.resolve.num_cores", lambda: 2), mock.patch("conf.resolve.find_device", lambda: device):
        return resolve(config)
