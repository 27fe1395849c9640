"""A trace as one HTML page: the source with what each line asks of memory, and who touches what.

The page holds its own style and needs no network. Shades carry numbers beside them, so that it can
be read in grey.
"""

import html
import linecache

from course_lib.scripts.finding import shown_path
from course_lib.simulator.tracing.counts import SECTOR_BYTES, WARP_SIZE

#: Requests that are drawn of each access.
DRAWN = 8
_BANKS = 32
_STYLE = """
body { font: 15px/1.5 sans-serif; margin: 2em auto; max-width: 76em; padding: 0 1em; color: #222 }
code, pre, .map { font: 12px/1.4 monospace } h2 { margin-top: 2em }
table { border-collapse: collapse } td, th { padding: 1px 6px; text-align: right }
.source td { white-space: pre; text-align: left; border-bottom: 1px solid #eee }
.source td.number { color: #888; text-align: right } .source td:last-child { white-space: normal }
.map td { border: 1px solid #fff; min-width: 1.7em; padding: 1px 2px; text-align: center }
.map th { font-weight: normal; color: #666; white-space: nowrap } details { margin: .4em 0 }
.bad { background: #f3c9b5 } .fair { background: #f6eac2 } .good { background: #dcebd5 }
.idle { color: #bbb }
"""


def page(trace, result):
    """The HTML of a page about `trace`, a ScriptTrace, whose `formats.Result` is `result`."""
    kernels = {}
    for site in trace.sites:
        kernels.setdefault((site.filename, site.function), ([], []))[0].append(site)
    for branch in trace.branches:
        kernels.setdefault((branch.filename, branch.function), ([], []))[1].append(branch)
    parts = [_kernel(*key, *found) for key, found in kernels.items()]
    notes = "".join(f"<p>{html.escape(each)}.</p>" for each in result.unchecked)
    title = html.escape(f"Trace of {result.program}")
    return (f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            f"<style>{_STYLE}</style></head><body><h1>{title}</h1>"
            f"<p>{html.escape(result.summary())}. A request is one access of a warp; a sector is "
            f"{SECTOR_BYTES} bytes of global memory, moved whole; bank ways are the turns that "
            f"lanes take at the banks of shared memory, 1 where nobody waits.</p>{notes}"
            f"{''.join(parts)}</body></html>\n")


def _kernel(filename, function, sites, branches):
    lines = {}
    for each in (*sites, *branches):
        lines.setdefault(each.line, []).append(_chip(each))
    rows = []
    for number in range(min(lines), max(lines) + 1):
        source = html.escape(linecache.getline(filename, number).rstrip())
        rows.append(f'<tr><td class="number">{number}</td><td><code>{source}</code></td>'
                    f"<td>{'<br>'.join(lines.get(number, ()))}</td></tr>")
    heading = html.escape(f"{function}, {shown_path(filename)}")
    maps = "".join(map(_map, sites))
    return (f'<h2>{heading}</h2><table class="source">{"".join(rows)}</table>'
            f"<h3>Who touches what</h3>{maps}")


def _chip(each):
    """What one access or branch came to, in a few words, shaded by how much of it is lost."""
    if not hasattr(each, "space"):
        return _shaded(f"<code>{html.escape(each.source)}</code>: {each.executions:,} times, "
                       f"{each.divergent:,} divergent", each.divergent / (each.executions or 1) * 4)
    name = f"{each.op} <code>{html.escape(each.source)}</code>: {each.requests:,} requests"
    if each.space == "shared":
        return _shaded(f"{name}, bank ways {each.bank_ways:.3g}", each.bank_ways - 1)
    asked, moved = each.bytes, each.bytes_moved
    return _shaded(f"{name}, {each.sectors_per_request:.3g} sectors each; {asked:,} bytes asked "
                   f"for, {moved:,} moved", moved / asked - 1)


def _shaded(text, loss):
    """`text` on a shade; `loss` is 0 where nothing is lost, and 1 where as much again is."""
    shade = "good" if loss < 0.2 else "fair" if loss < 1 else "bad"
    return f'<span class="{shade}">{text}</span>'


def _map(site):
    """A row for each of the first requests, a cell for each lane: its element, and where it is."""
    in_shared = site.space == "shared"
    head = "".join(f"<th>{lane}</th>" for lane in range(WARP_SIZE))
    rows = []
    for (block, warp), addresses in zip(site.warps[:DRAWN], site.addresses[:DRAWN], strict=True):
        cells = "".join(_lane(site, lane, int(address), in_shared)
                        for lane, address in enumerate(addresses))
        rows.append(f"<tr><th>block {block}, warp {warp}</th>{cells}</tr>")
    what = "bank" if in_shared else "sector"
    return (f"<details><summary>line {site.line}: {site.op} <code>{html.escape(site.source)}</code>"
            f", {site.space}</summary><p>The element that each lane touches in the first "
            f"{len(rows)} of {site.requests:,} requests; a shade is a {what}.</p>"
            f'<table class="map"><tr><th>lane</th>{head}</tr>{"".join(rows)}</table></details>')


def _lane(site, lane, address, in_shared):
    if address < 0:
        return '<td class="idle">·</td>'
    place = address // 4 % _BANKS if in_shared else (address - site.base) // SECTOR_BYTES
    element = (address - site.base) // site.itemsize
    what = f"bank {place}" if in_shared else f"sector {place}"
    # Neighbours differ; the golden angle keeps hues of further ones apart.
    colour = f"hsl({place * 137 % 360} 60% {78 + place % 3 * 6}%)"
    return f'<td style="background: {colour}" title="lane {lane}: {what}">{element}</td>'
