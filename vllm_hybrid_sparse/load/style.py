"""The style sheet of the HTML report: light and dark, as the reader's system is set."""

STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --text: #1d2430; --soft: #5b6675; --rule: #dfe4ea; --warn: #a33b00;
  --c0: #0b6fb8; --c1: #c2410c; --c2: #15803d; --c3: #7c3aed; --c4: #b4236b; --c5: #0e7490; }
@media (prefers-color-scheme: dark) { :root { --back: #14181f; --text: #e4e8ee; --soft: #9aa6b5; --rule: #2d3540;
  --warn: #ffa566; --c0: #5cb3f2; --c1: #ff9b62; --c2: #63d08a; --c3: #b79cff; --c4: #ff86bd; --c5: #57c8dc; } }
body { margin: 0 auto; max-width: 1340px; padding: 1rem 1.5rem 3rem; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0.5rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 0.5rem; }
p, .note { color: var(--soft); margin: 0.3rem 0; } .warn { color: var(--warn); font-weight: 600; }
code { font: 13px/1.4 ui-monospace, monospace; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.75rem; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap; }
th:first-child, td:first-child, td.words { text-align: left; } th { color: var(--soft); font-weight: 600; }
td.words { white-space: normal; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 1.5rem; }
figure { margin: 0; min-width: 0; } svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--text); font: 12px system-ui, sans-serif; } svg .title { font-size: 14px; font-weight: 600; }
svg .tick { fill: var(--soft); font-size: 11px; } .grid { stroke: var(--rule); }
.level { stroke: var(--soft); stroke-dasharray: 5 4; } .line { fill: none; stroke-width: 2; }
.dot { fill-opacity: 0.65; stroke: none; }
.legend { list-style: none; margin: 0.2rem 0 0;
  padding: 0 0 0 10%; display: flex; flex-wrap: wrap; gap: 0.2rem 1.2rem; }
.key { display: inline-block; width: 0.8rem; height: 0.8rem; border-radius: 2px; margin-right: 0.4rem; }
.c0 { stroke: var(--c0); fill: var(--c0); background: var(--c0); } .c1 { stroke: var(--c1); fill: var(--c1);
  background: var(--c1); } .c2 { stroke: var(--c2); fill: var(--c2); background: var(--c2); }
.c3 { stroke: var(--c3); fill: var(--c3); background: var(--c3); } .c4 { stroke: var(--c4); fill: var(--c4);
  background: var(--c4); } .c5 { stroke: var(--c5); fill: var(--c5); background: var(--c5); }
polyline.line { fill: none; }
"""
