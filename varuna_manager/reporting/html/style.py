"""The style sheet of the report's page: light, dark and for paper."""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5b6570; --rule: #d9dee3;
  --ground: #ffffff; --panel: #f6f8fa; --c0: #0072b2; --c1: #d55e00; --c2: #009e73;
  --c3: #b2589a; --c4: #b07c00; --c5: #3b8fc4; --bad: #c0392b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --soft: #9aa5b1;
  --rule: #343b43; --ground: #14171a; --panel: #1d2126; --c0: #5ab4f0; --c1: #ff8c42;
  --c2: #35c79a; --c3: #e39cc8; --c4: #f0bf4c; --c5: #9ad3f5; --bad: #ff7b6b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.5rem 4rem; max-width: 66rem; color: var(--ink);
  background: var(--ground); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.4rem 0 .6rem; }
p { margin: .5rem 0; max-width: 48rem; }
.lead { font-size: 1.08rem; }
.soft, figcaption, footer { color: var(--soft); font-size: .87rem; }
.state { display: inline-block; margin-left: .6rem; padding: .05rem .6rem; font-size: .9rem;
  border: 1.5px solid currentColor; border-radius: 1rem; vertical-align: .25rem; }
.good { color: var(--c2); } .bad { color: var(--bad); } .open { color: var(--c4); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.2rem, 1fr));
  gap: .7rem; margin: 1.4rem 0; padding: 0; }
.tiles div { background: var(--panel); border: 1px solid var(--rule); border-radius: 6px;
  padding: .6rem .8rem; }
.tiles dt { color: var(--soft); font-size: .82rem; }
.tiles dd { margin: 0; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
.tiles small { display: block; color: var(--soft); font-size: .8rem; }
figure { margin: 0 0 .9rem; break-inside: avoid; }
figcaption { display: flex; gap: 1rem; flex-wrap: wrap; align-items: baseline; }
figcaption b { color: var(--ink); font-size: .95rem; }
svg { display: block; width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); }
.value { text-anchor: end; } .time, .name { text-anchor: middle; }
svg .shape, svg .name { fill: var(--ink); font-weight: 600; }
.grid { stroke: var(--rule); fill: none; stroke-width: .7; }
.hit { stroke: var(--bad); fill: none; stroke-width: .8; stroke-opacity: .35; }
.morph { stroke: var(--ink); stroke-opacity: .3; stroke-dasharray: 2 3; fill: none; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); stroke-dasharray: 7 3; }
.c2 { stroke: var(--c2); stroke-dasharray: 2 3; } .c3 { stroke: var(--c3); stroke-dasharray: 9 3 2 3; }
.c4 { stroke: var(--c4); stroke-dasharray: 4 2; } .c5 { stroke: var(--c5); stroke-dasharray: 1 3; }
.band { fill: var(--c0); fill-opacity: .2; }
.predicted { stroke: var(--c1); stroke-width: 1.6; stroke-dasharray: 5 4; fill: none; }
.budget { stroke: var(--bad); stroke-width: 1.8; fill: none; }
.held { fill: var(--c5); fill-opacity: .35; } .working { fill: var(--c0); fill-opacity: .65; }
.vms { stroke: var(--ground); stroke-width: .5; }
.box { fill-opacity: .4; stroke: var(--ground); stroke-width: 1; }
.box.thin { stroke: none; fill-opacity: .7; }
.b0 { fill: var(--c0); } .b1 { fill: var(--c1); } .b2 { fill: var(--c2); }
.b3 { fill: var(--c3); } .b4 { fill: var(--c4); } .b5 { fill: var(--c5); }
.mark { stroke: var(--ink); stroke-width: 1.6; fill: none; pointer-events: bounding-box; }
.k-notice { stroke: var(--c4); }
.k-kill, .k-silence, .k-sick_gpu { stroke: var(--bad); }
.k-worker_death, .k-hang { stroke: var(--c3); } .k-slow { stroke: var(--c1); }
.k-plan { stroke: var(--c0); } .k-checkpoint { stroke: var(--soft); stroke-width: 1; }
.mark:hover, .box:hover { stroke: var(--ink); stroke-width: 2.5; }
.key { display: inline-flex; align-items: center; gap: .35rem; }
.key svg { width: 26px; height: 8px; flex: none; }
.bar { display: flex; height: 1.9rem; border-radius: 4px; overflow: hidden; margin: .4rem 0; }
.bar span { color: #fff; font-size: .78rem; line-height: 1.9rem; text-align: center;
  overflow: hidden; white-space: nowrap; border-right: 1.5px solid var(--ground); }
.productive { background: #0072b2; } .morph-time { background: #b04e00; }
.boot { background: #8a6100; } .idle { background: #6b7682; } .lost { background: #c0392b; }
.manager { background: #4b5fa5; }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .45em; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
caption { text-align: left; color: var(--soft); padding-bottom: .3rem; }
th { text-align: left; font-weight: 600; border-bottom: 1.5px solid var(--rule); }
td, th { padding: .25rem .7rem .25rem 0; vertical-align: top; }
td { border-bottom: 1px solid var(--rule); overflow-wrap: anywhere; }
.r { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; overflow-wrap: normal; }
details > summary { cursor: pointer; margin: 2.2rem 0 .6rem; font-size: 1.1rem; font-weight: 600; }
footer { margin-top: 3rem; border-top: 1px solid var(--rule); padding-top: .8rem; }
@media print { :root { --ink: #000; --soft: #444; --rule: #bbb; --ground: #fff;
  --panel: #fff; --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b2589a;
  --c4: #b07c00; --c5: #3b8fc4; --bad: #c0392b; }
  body { max-width: none; padding: 0; font-size: 10.5pt; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  h2, summary { break-after: avoid; } tr { break-inside: avoid; } .wide { overflow: visible; } }
"""
