"""metric_ranks.py: rank correlations, also of metrics that rows lack or that are the same in all."""

import metric_ranks
import pytest


def rows_of(**metrics) -> list[dict]:
    return [
        {"recipe": str(place), "perplexity": 10.0 + place, "bits": 2.0}
        | {name: values[place] for name, values in metrics.items() if values[place] != "missing"}
        for place in range(4)
    ]


def found(**metrics) -> dict:
    rows = rows_of(**metrics)
    return {
        name: own["all"] for name, own in metric_ranks.correlations(rows, {"all": rows, "2 bits": rows[:1]}).items()
    }


def test_order_is_what_counts():
    assert found(output_rel_mse=[1, 2, 5, 9], top10_overlap=[4, 3, 2, 1], v_rel_mse=[4, 3, 2, 1]) == pytest.approx(
        {"output_rel_mse": 1, "top10_overlap": 1, "v_rel_mse": -1}
    )


def test_equal_values_share_a_rank():
    assert found(x=[1, 1, 2, 2])["x"] == pytest.approx(0.8**0.5)


@pytest.mark.parametrize(
    "values", [[1, 1, 1, 1], [None, None, None, 1], [None] * 4, ["missing", 3, None, None]], ids=str
)
def test_metric_without_an_order_has_no_correlation(values):
    assert found(x=values, output_rel_mse=[1, 2, 3, 4]) == {"x": None, "output_rel_mse": 1}
    assert metric_ranks.text_of(None, 8, 3) == "       -"


def test_rows_without_a_metric_are_left_out():
    assert found(x=["missing", 1, 2, 3], y=[3, None, 2, 1]) == pytest.approx({"y": -1, "x": 1})


def test_a_group_of_one_row_has_no_correlation():
    rows = rows_of(x=[1, 2, 3, 4])
    assert metric_ranks.correlations(rows, {"all": rows, "2 bits": rows[:1]}) == {"x": {"all": 1, "2 bits": None}}


def test_means_without_attention():
    assert metric_ranks.flat({"rope_logit_mae": 2.0}) == {"rope_logit_mae": 2.0}
