"""What every test of the state machine begins with."""

from __future__ import annotations

import pytest

from common.metrics import Metrics
from common.wire.messages import Ping, Welcome
from tests.scheduler.rig import Rig


@pytest.fixture
def rig(metrics: Metrics) -> Rig:
    """One gateway and one worker have joined."""
    rig = Rig(metrics)
    rig.join()
    rig.hello()
    rig.take(Welcome)
    rig.take(Ping)
    return rig
