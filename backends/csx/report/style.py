"""The page's style sheet: light and dark, from a phone to a wide screen.

What stays in memory is blue, what comes and goes is orange.
"""

from __future__ import annotations

CSS = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --line: #dfe3e8; --rail: #e9ecf0;
  --text: #1c2126; --muted: #59636e; --link: #1f5fae; --code: #f2f4f7;
  --c1: #2f66ad; --c2: #7ba3d6; --c3: #a9c3e6; --c4: #cfd8e3; --c5: #d1741c; --c6: #f0b878;
  --library: #2f66ad; --generated: #2e8555; --host: #c2491d; --none: #98a2ad;
  --collective: #7d4fa8;
  --warn: #fff6e0; --warn-line: #e2bf63;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #111417; --card: #181c20; --line: #2c3238; --rail: #262c32;
    --text: #e4e8ec; --muted: #9aa5b1; --link: #8ab8ef; --code: #1f2429;
    --c1: #4d86cf; --c2: #355f99; --c3: #2a4770; --c4: #3a444f; --c5: #e08a35; --c6: #8f5a22;
    --library: #5b93da; --generated: #4fae7b; --host: #e8764a; --none: #6b7681;
    --collective: #a982d1;
    --warn: #2b2410; --warn-line: #7d6420;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; scroll-padding-top: 3.2rem; }
body {
  margin: 0; background: var(--page); color: var(--text);
  font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", Arial, sans-serif;
  font-variant-numeric: tabular-nums;
}
main, header > div, footer { max-width: 1180px; margin: 0 auto; padding: 0 20px; }
header { background: var(--card); border-bottom: 1px solid var(--line); padding: 14px 0 12px; }
h1 { font-size: 17px; margin: 0; font-weight: 650; }
header p { margin: 2px 0 0; color: var(--muted); overflow-wrap: anywhere; }
nav { position: sticky; top: 0; z-index: 1; background: var(--card);
  border-bottom: 1px solid var(--line); }
nav div { max-width: 1180px; margin: 0 auto; padding: 6px 20px; display: flex; gap: 4px 18px;
  overflow-x: auto; white-space: nowrap; }
nav b { font-weight: 600; }
a { color: var(--link); text-decoration: none; }
a:hover { text-decoration: underline; }
article { padding-top: 22px; }
h2 { font-size: 24px; line-height: 1.2; margin: 0; font-weight: 650; letter-spacing: -0.01em;
  text-transform: capitalize; }
h2 + p { margin: 4px 0 14px; color: var(--muted); overflow-wrap: anywhere; }
.jump { display: flex; flex-wrap: wrap; gap: 0 16px; margin: -8px 0 14px; font-size: 13px; }
.entry { margin: 26px 0 10px; font-size: 16px; font-weight: 650; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 14px 18px 16px; margin: 0 0 14px; min-width: 0; }
h3 { font-size: 14px; margin: 0 0 8px; font-weight: 650; }
h4 { font-size: 13px; margin: 14px 0 6px; font-weight: 600; }
section > p { margin: 0 0 10px; color: var(--muted); max-width: 78ch; }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas,
  "DejaVu Sans Mono", monospace; font-size: 12.5px; }
summary code, dd code, .source { overflow-wrap: anywhere; }
.muted { color: var(--muted); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(138px, 1fr)); gap: 1px;
  background: var(--line); border: 1px solid var(--line); border-radius: 8px; overflow: hidden;
  margin: 0 0 14px; }
.tiles > div { background: var(--card); padding: 10px 14px 11px; }
.tiles span { display: block; color: var(--muted); font-size: 12px; }
.tiles b { display: block; font-size: 19px; line-height: 1.35; font-weight: 600;
  white-space: nowrap; }
.tiles span { overflow-wrap: anywhere; }
.facts { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 3px 18px;
  margin: 0; }
dt { color: var(--muted); }
dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin: 0 -18px; padding: 0 18px; }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; font-weight: 500; color: var(--muted); font-size: 12px;
  white-space: nowrap; }
th, td { padding: 4px 14px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
th:last-child, td:last-child { padding-right: 0; }
.num { text-align: right; white-space: nowrap; }
.wide { width: 24%; min-width: 110px; }
.name { display: inline-block; width: max-content; max-width: 44ch; overflow-wrap: anywhere; }
.changes { min-width: 240px; }
.gist { display: block; color: var(--muted); font-size: 12.5px; }
td .source { display: block; color: var(--muted); min-width: 220px; }
svg { display: block; width: 100%; }
.bar { height: 8px; margin-top: 7px; border-radius: 2px; }
.parts { height: 8px; border-radius: 2px; margin: 4px 0 8px; }
.rail { fill: var(--rail); } .over { fill: transparent; }
.over:hover { fill: var(--text); fill-opacity: 0.12; }
.c1 { fill: var(--c1); } .c2 { fill: var(--c2); } .c3 { fill: var(--c3); } .c4 { fill: var(--c4); }
.c5 { fill: var(--c5); } .c6 { fill: var(--c6); }
.library { fill: var(--library); } .generated { fill: var(--generated); }
.host { fill: var(--host); } .collective { fill: var(--collective); }
.view, .removed { fill: var(--none); }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 7px; }
.key svg { height: 10px; }
.keys { display: flex; flex-wrap: wrap; gap: 2px 20px; margin: 0 0 10px; }
.plot { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 0 10px; }
.plot .y { position: relative; height: 240px; font-size: 12px; color: var(--muted);
  text-align: right; }
.plot .y span { display: block; height: 60px; line-height: 1; transform: translateY(-0.5em);
  white-space: nowrap; }
.plot .area { position: relative; height: 240px; border-left: 1px solid var(--line);
  background: repeating-linear-gradient(var(--line) 0 1px, transparent 1px 60px); }
.plot .area svg { height: 240px; position: relative; }
.plot .area { border-bottom: 1px solid var(--muted); }
.phases { grid-column: 2; display: flex; font-size: 12px; color: var(--muted); margin-top: 3px; }
.phases span { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; min-width: 0;
  border-left: 1px solid var(--line); padding-left: 5px; }
.cell { display: block; white-space: nowrap; }
.bound { display: block; color: var(--muted); font-size: 12px; padding-left: 7px;
  border-left: 3px solid var(--none); }
.b1 { border-color: var(--generated); } .b2 { border-color: var(--library); }
.b3 { border-color: var(--host); }
details { border-top: 1px solid var(--line); }
details:first-of-type { border-top: 0; }
summary { cursor: pointer; padding: 6px 0; overflow-wrap: anywhere; }
dd summary { padding: 0; }
summary::marker { color: var(--muted); }
summary:hover { background: var(--code); }
details > :not(summary) { margin-left: 15px; }
details > .scroll { margin: 0 -18px 8px 0; padding: 0 18px 0 0; }
.row { display: inline-grid; width: calc(100% - 20px); vertical-align: top; gap: 0 14px;
  grid-template-columns: minmax(0, 1fr) 100px 90px 90px 90px 90px; }
.row > :nth-child(n+3) { text-align: right; white-space: nowrap; }
.row.head { display: grid; margin-left: 15px; color: var(--muted); font-size: 12px; }
.row.kinds { grid-template-columns: minmax(0, 1fr) 110px 70px 22%; }
.row.kinds > :nth-child(4) { text-align: left; }
pre { background: var(--code); border-radius: 6px; padding: 10px 12px; margin: 6px 0 12px;
  overflow: auto; max-height: 460px; line-height: 1.45; tab-size: 4; }
.warning { background: var(--warn); border-left: 3px solid var(--warn-line); padding: 7px 12px;
  margin: 0 0 8px; border-radius: 0 6px 6px 0; overflow-wrap: anywhere; white-space: pre-line; }
strong { font-weight: 650; }
footer { padding: 8px 20px 40px; color: var(--muted); font-size: 12px; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 1px; }
@media (max-width: 640px) {
  main, header > div, nav div, footer { padding-left: 14px; padding-right: 14px; }
  section { padding: 12px 14px 14px; border-radius: 6px; }
  .scroll { margin: 0 -14px; padding: 0 14px; }
  .name { max-width: 24ch; }
  .facts { grid-template-columns: minmax(0, 1fr); gap: 0; }
  dd { margin-bottom: 6px; }
  .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  .tiles > div:last-child:nth-child(odd) { grid-column: span 2; }
  .row { grid-template-columns: minmax(0, 1fr) max-content max-content; }
  .row > :nth-child(n+3):not(:last-child) { display: none; }
  .row.kinds { grid-template-columns: minmax(0, 1fr) max-content 44px; }
  .row.kinds > :nth-child(3) { display: block; }
  .row.kinds > :nth-child(4) { display: none; }
}
@media print { nav { display: none; } section { break-inside: avoid-page; } }
"""
