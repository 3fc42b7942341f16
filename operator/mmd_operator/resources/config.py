"""ConfigMap with the configuration of a pipeline revision: one file per component, with the fields that the component reads."""

from __future__ import annotations

from mmd_api.contract.pools import POOL_NAMES
from mmd_api.pipeline import PipelineConfig
from mmd_api.readers import Component
from mmd_operator.resources.naming import Manifest, RevisionScope


def config_map(scope: RevisionScope) -> Manifest:
    """ConfigMap with `COMPONENT.json` for the gateway and every pool of this revision."""
    components: list[Component] = [*(p for p in POOL_NAMES if getattr(scope.spec, p) is not None), "gateway"]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": scope.metadata(scope.config, of_revision=True),
        "data": {config_file(c): _text(scope, c) for c in components},
    }


def config_file(component: Component) -> str:
    """Key of a component's configuration in the ConfigMap."""
    return f"{component}.json"


def _text(scope: RevisionScope, component: Component) -> str:
    return PipelineConfig.text_for(scope.spec, scope.namespace, scope.name, component, scope.pinned)
