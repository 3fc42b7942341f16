"""Every dashboard, in the order in which they are read."""

from __future__ import annotations

from mmd_dashboards.encoder import ENCODER
from mmd_dashboards.engine import ENGINE
from mmd_dashboards.operator import OPERATOR
from mmd_dashboards.overview import OVERVIEW
from mmd_dashboards.scaling import SCALING
from mmd_dashboards.transfers import TRANSFERS

BOARDS = (OVERVIEW, ENCODER, ENGINE, TRANSFERS, SCALING, OPERATOR)
