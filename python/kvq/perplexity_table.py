"""The table of perplexity.py, within 80 columns."""

from .bootstrap import SAMPLES

NAME_WIDTH = 23


def shortened(name: str) -> str:
    """`name`, its middle left out if it is wider than its column."""
    if len(name) <= NAME_WIDTH:
        return name
    head = (NAME_WIDTH - 1) // 2
    return f"{name[:head]}…{name[-(NAME_WIDTH - 1 - head) :]}"


def percent(value: float) -> str:
    return f"{100 * value:+.2f}"


def interval(difference: dict) -> str:
    if difference["interval"] is None:
        return "-"
    low, high = difference["interval"]
    return f"[{percent(low)}, {percent(high)}]"


def row(result: dict) -> str:
    difference = result["difference"]
    change, around = (f"{percent(difference['change'])}%", interval(difference)) if difference else ("", "")
    return (
        f"{shortened(result['name']):<{NAME_WIDTH}} {result['bytes_per_token']:>8} {result['perplexity']:>10.4f} "
        f"{result['nll']:>8.4f} {change:>9} {around:>17}"
    ).rstrip()


def described(windows: dict) -> str:
    if not windows["sink_tokens"] and not windows["recent_tokens"]:
        return "none"
    return f"first {windows['sink_tokens']} and last {windows['recent_tokens']}"


def notes(document: dict) -> list[str]:
    """What a reader of the table must know: windows, the interval, and what hides or blurs a difference."""
    results, lines = document["results"], []
    coded = [result for result in results if result["kind"] != "exact"]
    kinds = {described(result["windows"]) for result in coded}
    if len(kinds) == 1:
        lines.append(f"tokens that stay exact: {kinds.pop()}")
    else:
        lines += [f"tokens that stay exact, {shortened(r['name'])}: {described(r['windows'])}" for r in coded]
    hidden = [r["name"] for r in coded if sum(r["windows"].values()) >= document["window_tokens"]]
    if hidden:
        lines.append(f"{shortened(hidden[0])}: no token is ever coded, because exact windows hold them all;")
        lines.append("--windows none codes every token")
    compared = [result["difference"] for result in results if result["difference"]]
    if compared and document["num_windows"] == 1:
        lines.append("One window: no interval can be given. --num-windows 2 or more gives one.")
    elif compared:
        lines.append(f"[ ]: 95% interval of the change, {SAMPLES} paired bootstrap samples of the windows.")
        if any(low <= 0 <= high for low, high in (each["interval"] for each in compared)):
            lines.append("An interval that holds 0 shows no difference: more windows narrow it.")
    return lines


def table(document: dict) -> str:
    """Lines of at most 80 columns: what was measured, a row a candidate, and notes."""
    against = f"vs {shortened(document['baseline'])[:6]}" if document["baseline"] else ""
    lines = [
        f"{document['tokens']} tokens in {document['num_windows']} windows of {document['window_tokens']}",
        "",
        f"{'':<{NAME_WIDTH}} {'B/token':>8} {'perplexity':>10} {'nats':>8} {against:>9}".rstrip(),
        *map(row, document["results"]),
        "",
        *notes(document),
    ]
    return "\n".join(lines).rstrip()
