"""Network policies of the pods."""

from __future__ import annotations

from typing import Literal

from mmd_api.base import ApiModel


class NetworkSpec(ApiModel):
    """NetworkPolicies of the pods."""

    egress: Literal["Open", "Restricted"] = "Open"
    """Where pods may connect to. Restricted: to DNS, one another, and what the spec makes them use (docs/security.md). Other NetworkPolicies can allow more."""
