"""The arithmetic of the benchmark suite, and that every benchmark runs. No time is asserted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FULL = ("step", "sampling", "scoring", "update", "objectives", "scaling")


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_ratios_are_formed_within_a_round():
    import harness

    ours = [{"seconds": 1.0, "tokens": 10, "peak_mb": 100.0}, {"seconds": 4.0, "tokens": 20, "peak_mb": 100.0}]
    theirs = [{"seconds": 3.0, "tokens": 10, "peak_mb": 250.0}, {"seconds": 8.0, "tokens": 10, "peak_mb": 150.0}]
    found = harness.ratios(ours, theirs)
    assert found["seconds"] == {"median": 2.5, "min": 2.0, "max": 3.0, "values": [3.0, 2.0]}
    assert found["seconds_per_token"]["values"] == pytest.approx([3.0, 4.0])
    assert found["peak_mb"]["values"] == [2.5, 1.5]


def test_sides_take_turns_and_one_that_fails_is_named(monkeypatch):
    import harness

    order = []

    def run_side(script, side):
        order.append(side.name)
        return {"failed": "it is not there"} if side.name == "b" else {"seconds": 1.0}

    monkeypatch.setattr(harness, "run_side", run_side)
    case = harness.Case("one", {"rows": 2}, [harness.Side(name, {}) for name in "abc"])
    found = harness.compare("script", case, 3)
    assert order == ["a", "b", "c", "c", "a", "c", "a"]
    assert found["skipped"] == {"b": "it is not there"}
    assert list(found["ratios"]) == ["c"]
    assert found["sides"]["a"]["seconds"]["values"] == [1.0, 1.0, 1.0]


def test_the_command_leaves_out_where_the_result_went():
    import harness

    assert harness.command(["/a/bench_step.py", "--json", "/b/c.json", "--pairs", "3"]) == (
        "python benchmarks/bench_step.py --pairs 3"
    )


def test_floors_count_useful_operations():
    import floors

    sizes = floors.Sizes(4, 8, 2, 2, 1, 2, 10)
    assert sizes.layer() == [(4, 8), (4, 4), (4, 16), (8, 4)]
    assert sizes.weights == 2 * (32 + 16 + 64 + 32) + 40
    both = [*floors.forward(5, [(4, 8)]), *floors.backward(5, [(4, 8)])]
    assert both == [(5, 4, 8), (5, 8, 4), (8, 5, 4)]
    assert floors.operations(both) == 6 * 5 * 4 * 8
    rates = floors.Rates({"bandwidth": 1.0, "5x4x8": 320.0, "5x8x4": 160.0, "8x5x4": 80.0})
    assert rates.seconds(both) == 1.0 + 2.0 + 4.0


def test_the_scaling_fit_is_least_squares():
    import bench_scaling

    assert bench_scaling.fit([(1, 3), (2, 5), (3, 7)]) == pytest.approx({"slope": 2, "intercept": 1, "r2": 1})


def test_results_find_their_place_in_the_page():
    import write_performance

    page = "a\n<!-- step: begin -->\nold\n<!-- step: end -->\nb"
    assert write_performance.put(page, "step", "new") == "a\n<!-- step: begin -->\nnew\n<!-- step: end -->\nb"
    with pytest.raises(SystemExit, match="no place for other"):
        write_performance.put(page, "other", "new")


def test_the_page_has_a_place_for_every_benchmark():
    import write_performance

    page = write_performance.PAGE.read_text(encoding="utf-8")
    for name in (*FULL, "machine"):
        assert f"<!-- {name}: begin -->" in page


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL)
def test_benchmark_runs(name, tmp_path):
    to = tmp_path / "result.json"
    command = [sys.executable, str(BENCHMARKS / f"bench_{name}.py"), "--quick", "--json", str(to)]
    if name == "step":
        command += ["--updates", "2", "--lengths", "full"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    content = json.loads(to.read_text(encoding="utf-8"))
    assert content["benchmark"] == name
    assert content["quick"]
    assert content["machine"]["cores"] >= 1
    assert content["cases"]
    for case in content["cases"]:
        first = next(iter(case["sides"].values()), None)
        assert first is not None, case["skipped"]
        assert first["seconds"]["median"] > 0
        assert set(case["ratios"]) == set(list(case["sides"])[1:])
        if name not in ("scaling",):
            assert case["floor"]["seconds"] > 0
    assert "| case |" in _tables().markdown(content)


def _tables():
    import tables

    return tables
