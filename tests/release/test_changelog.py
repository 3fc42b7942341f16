"""The changelog: what stands where."""

from __future__ import annotations

import pytest

from release.changelog import changelog


def test_changes_stand_under_their_first_area_once_and_merges_nowhere():
    subjects = [
        "tests: wait for a report",
        "router: weigh transfer by bandwidth",
        "Operator, api: restrict egress",
        "Merge branch 'a' into b",
        "operator: name the quota",
        "router: weigh transfer by bandwidth",
        "Begin",
        "docs, tests: say: it is so",
    ]
    assert changelog("v1.2.3", subjects) == (
        "# v1.2.3\n\n"
        "## operator\n\n- restrict egress\n- name the quota\n\n"
        "## router\n\n- weigh transfer by bandwidth\n\n"
        "## docs\n\n- say: it is so\n\n"
        "## tests\n\n- wait for a report\n\n"
        "## other\n\n- Begin\n"
    )


@pytest.mark.parametrize("subjects", [[], ["Merge branch 'a'"]])
def test_a_release_without_changes_says_so(subjects):
    assert changelog("v1", subjects) == "# v1\n\nNo changes.\n"
