import pytest

from mmd_api.faults import InvalidDeploymentError
from mmd_api.resource import MultimodalDeployment
from support.cluster.manifests import BadManifest, bad_manifests, base_manifest


def test_the_base_of_the_table_is_valid():
    assert MultimodalDeployment.parse(base_manifest()).metadata.name == "sample"


@pytest.mark.parametrize("case", bad_manifests(), ids=lambda c: c.name)
def test_each_bad_manifest_is_refused_once_at_its_field_with_a_remedy(case: BadManifest):
    with pytest.raises(InvalidDeploymentError) as refused:
        MultimodalDeployment.parse(case.manifest)
    at_field = [f for f in refused.value.faults if f.field == case.field and case.words in f.message]
    assert len(at_field) == 1, refused.value.faults
    assert ";" in at_field[0].message, "no remedy"
    others = [f for f in refused.value.faults if f not in at_field and f.field != case.field]
    assert not others, "faults that this manifest does not have"
