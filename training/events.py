"""What a run tells TensorBoard beside plain scalars: texts, the layout of CUSTOM SCALARS, the timeline, HParams.

One session a run, written into the run's own folder. torch's add_hparams would open a second run named by a time, and
tensorboard's own helpers need TensorFlow: so the two messages are built here. The HParams tab takes its metrics from
the ordinary scalars. Imports TensorBoard inside its functions.
"""

from __future__ import annotations

import json
import statistics
import struct
import time
from pathlib import Path
from typing import Any

from conf.schema import RootConfig, to_dict
from training.outcome import read_plan

# the CUSTOM SCALARS tab: category -> chart -> regular expressions of its tags
LAYOUT = {
    "loss": {
        "by step": ["Multiline", ["^loss/train$", "^loss/validation$"]],
        "by tokens": ["Multiline", ["^over_tokens/loss/train$", "^over_tokens/loss/validation$"]],
    },
    "throughput": {
        "tokens/s": ["Multiline", ["^throughput/tokens_per_s$"]],
        "mfu": ["Multiline", ["^throughput/mfu$"]],
    },
    "bubble": {
        "measured and theory": ["Multiline", ["^bubble/(fraction|ideal|simulated)$"]],
        "parts of a step, seconds": ["Multiline", ["^time/.*"]],
    },
    "memory": {"peak of each stage's rank, bytes": ["Multiline", [r"^memory/rank_\d+_bytes$"]]},
}


def scalars(figures: dict[str, Any], tags: dict[str, str]) -> dict[str, float]:
    """The tags and values of a step's or validation's record: `tags` by key, memory by rank, time as means over ranks.

    What is None (an emulated run has no loss) is left out.
    """
    found = {tags[key]: value for key, value in figures.items() if key in tags and value is not None}
    found |= {f"memory/rank_{rank}_bytes": value for rank, value in enumerate(figures.get("memory_bytes") or [])}
    return found | {f"time/{part}": statistics.mean(ranks) for part, ranks in (figures.get("time") or {}).items()}


def texts(run_dir: Path, config: RootConfig) -> dict[str, str]:
    """The TEXT tab: the configuration, and what was planned."""
    plan = {key: value for key, value in read_plan(run_dir).items() if key != "config"}  # it is the other text
    found = {"config": f"```yaml\n{_as_yaml(to_dict(config))}\n```"}
    return found | ({"plan": f"```yaml\n{_as_yaml(json.loads(json.dumps(plan)))}\n```"} if plan else {})


def _as_yaml(values: dict) -> str:
    import yaml

    return yaml.safe_dump(values, sort_keys=False)


def picture(path: Path, tag: str) -> Any:
    """The summary that shows a PNG under IMAGES, as it is; None where there is none."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    if not path.exists():
        return None
    png = path.read_bytes()
    width, height = struct.unpack(">II", png[16:24])  # the header chunk: https://www.w3.org/TR/png-3/#11IHDR
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png)
    return Summary(value=[Summary.Value(tag=tag, image=image)])


# --- HParams ---


def session_start(columns: dict[str, int | float | str]) -> Any:
    """The summary that opens a run's session, with its values."""
    from tensorboard.plugins.hparams import metadata as tags
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

    info = SessionStartInfo(start_time_secs=time.time())
    for key, value in columns.items():
        if isinstance(value, str):
            info.hparams[key].string_value = value
        else:
            info.hparams[key].number_value = value
    return _hparams_summary(tags.SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=info))


def session_end(status: str) -> Any:
    """The summary that ends it: success for completed and stopped, failure for every other status."""
    from tensorboard.plugins.hparams import api_pb2
    from tensorboard.plugins.hparams import metadata as tags
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

    shown = api_pb2.STATUS_SUCCESS if status in ("completed", "stopped") else api_pb2.STATUS_FAILURE
    info = SessionEndInfo(status=shown, end_time_secs=time.time())
    return _hparams_summary(tags.SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=info))


def _hparams_summary(tag: str, data: Any) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata as tags

    value = Summary.Value(tag=tag, metadata=tags.create_summary_metadata(data), tensor=tags.NULL_TENSOR)
    return Summary(value=[value])
