#include "report/style.h"

namespace kvq {

// A color has one meaning on all pages. --s<i>: schemes. --k, --v, --b: keys, values, and what they are compared with,
// shades without color. --w<i>, --t<i>: bands of width i (9: exact) and the number on them. --h<i>: cells of heat maps,
// from small to large, shades without color. --bad: a failure.
const char* const kReportStyle = R"css(
:root {
  color-scheme: light dark;
  --page: #ffffff; --ink: #1a1f24; --soft: #56606a; --rule: #d5dbe1; --grid: #e7ebee; --card: #f6f8f9;
  --s0: #0a4f9e; --s1: #b02c00; --s2: #00a36f; --s3: #a878b0;
  --s4: #cb8400; --s5: #4690ea; --s6: #7a4030; --s7: #3c2f4f;
  --k: #1a1f24; --v: #7d8790; --b: #56606a; --bad: #a8001c;
  --h0: #f2f4f5; --h1: #dfe3e6; --h2: #c8ced3; --h3: #aeb6bd; --h4: #929ba4;
  --h5: #768089; --h6: #5a646d; --h7: #3d464e; --h8: #1a1f24;
  --w0: #e4e7ea; --w1: #e6f2b4; --w2: #b7dfa4; --w3: #7ccbb8; --w4: #43b3c6;
  --w5: #3f97cc; --w6: #235fa9; --w7: #27348f; --w8: #0e1a57; --w9: #8f969e;
  --t0: #101820; --t1: #101820; --t2: #101820; --t3: #101820; --t4: #101820;
  --t5: #101820; --t6: #ffffff; --t7: #ffffff; --t8: #ffffff; --t9: #101820;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --page: #14181c; --ink: #e5e8eb; --soft: #a3acb5; --rule: #39414a; --grid: #262d34; --card: #1b2127;
    --s0: #6a86ff; --s1: #e8501a; --s2: #10bc7c; --s3: #f57fcd;
    --s4: #fabb1a; --s5: #bdf3fb; --s6: #eef09a; --s7: #86807f;
    --k: #e5e8eb; --v: #8d969f; --b: #a3acb5; --bad: #ff8a80;
    --h0: #20262c; --h1: #313940; --h2: #444d55; --h3: #59636c; --h4: #6f7983;
    --h5: #8a949d; --h6: #a7b0b7; --h7: #c6cdd2; --h8: #e5e8eb;
    --w0: #30373e; --w1: #35348f; --w2: #28559f; --w3: #2274ad; --w4: #3a9ebd;
    --w5: #63bdb4; --w6: #98d4a2; --w7: #cde79d; --w8: #f8f7bd; --w9: #8f969e;
    --t0: #ffffff; --t1: #ffffff; --t2: #ffffff; --t3: #ffffff; --t4: #101820;
    --t5: #101820; --t6: #101820; --t7: #101820; --t8: #101820;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1000px; margin: 0 auto; padding: 28px 16px 56px; }
h1 { font-size: 26px; line-height: 1.25; font-weight: 650; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 18px; font-weight: 650; margin: 44px 0 4px; padding-top: 14px; border-top: 1px solid var(--rule); }
h3 { font-size: 15px; font-weight: 600; margin: 20px 0 4px; }
p { margin: 4px 0 12px; }
.note, .missing, .sub { color: var(--soft); max-width: 76ch; overflow-wrap: anywhere; }
.missing { border-left: 3px solid var(--rule); padding-left: 10px; }
.verdict { font-size: 17px; line-height: 1.45; margin: 10px 0; max-width: 62ch; overflow-wrap: anywhere; }
.verdict strong { font-size: 21px; font-weight: 650; }
.bad { color: var(--bad); font-weight: 650; }
.tiles { display: grid; grid-template-columns: repeat(4, 1fr); gap: 10px; margin: 18px 0 0; }
@media (max-width: 760px) { .tiles { grid-template-columns: 1fr 1fr; } }
.tiles div { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 10px 12px;
  break-inside: avoid; }
.tiles dt { color: var(--soft); font-size: 13px; }
.tiles dd { margin: 0; overflow-wrap: anywhere; }
.tiles .big { font-size: 21px; line-height: 1.3; font-weight: 600; font-variant-numeric: tabular-nums; }
.tiles .more { color: var(--soft); font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 430px), 1fr)); gap: 20px 24px;
  align-items: start; }
.charts.small { grid-template-columns: repeat(auto-fill, minmax(min(100%, 150px), 1fr)); gap: 10px 12px; }
figure { margin: 0; min-width: 0; }
figcaption { font-weight: 600; font-size: 14px; margin: 6px 0 2px; }
.small figcaption { font-size: 12px; font-weight: 500; color: var(--soft); margin: 0; }
svg { display: block; width: 100%; height: auto; break-inside: avoid; }
svg text { font: 11px system-ui, sans-serif; fill: var(--ink); font-variant-numeric: tabular-nums; paint-order: stroke;
  stroke: var(--page); stroke-width: 2.5px; stroke-linejoin: round; }
svg .soft { fill: var(--soft); }
svg .mid { text-anchor: middle; }
svg .end { text-anchor: end; }
svg text.strong { font-weight: 700; }
.grid { stroke: var(--grid); stroke-width: 1; }
.grid.minor { stroke-width: 0.5; }
.grid.decade { stroke: var(--rule); stroke-width: 1.4; }
svg text.decade { font-weight: 600; }
.axis { stroke: var(--soft); stroke-width: 1; }
.s0 { --c: var(--s0); } .s1 { --c: var(--s1); } .s2 { --c: var(--s2); } .s3 { --c: var(--s3); }
.sk { --c: var(--k); } .sv { --c: var(--v); } .sb { --c: var(--b); }
.s4 { --c: var(--s4); } .s5 { --c: var(--s5); } .s6 { --c: var(--s6); } .s7 { --c: var(--s7); }
.line { fill: none; stroke: var(--c); stroke-width: 1.6; stroke-linejoin: round; }
.line.strong { stroke-width: 2.8; }
.line.d1 { stroke-dasharray: 6 3; }
.line.d2 { stroke-dasharray: 2 2.5; }
.leader { stroke: var(--c); stroke-width: 0.8; opacity: 0.55; }
.mark { fill: var(--c); stroke: var(--page); stroke-width: 0.8; }
.hollow { fill: var(--page); stroke: var(--c); stroke-width: 1.5; }
.spot { fill: transparent; }
.band { fill: var(--c); opacity: 0.22; }
.front { fill: none; stroke: var(--soft); stroke-width: 1.2; stroke-dasharray: 4 3; }
.fill { fill: var(--c); }
.level { stroke: var(--ink); stroke-width: 1.6; }
.h0 { fill: var(--h0); } .h1 { fill: var(--h1); } .h2 { fill: var(--h2); } .h3 { fill: var(--h3); }
.h4 { fill: var(--h4); } .h5 { fill: var(--h5); } .h6 { fill: var(--h6); } .h7 { fill: var(--h7); }
.h8 { fill: var(--h8); } .hn { fill: var(--page); stroke: var(--grid); stroke-width: 0.5; }
rect[class^=w] { stroke: var(--page); stroke-width: 0.4; }
.w0 { fill: var(--w0); } .w1 { fill: var(--w1); } .w2 { fill: var(--w2); } .w3 { fill: var(--w3); }
.w4 { fill: var(--w4); } .w5 { fill: var(--w5); } .w6 { fill: var(--w6); } .w7 { fill: var(--w7); }
.w8 { fill: var(--w8); } .w9 { fill: var(--w9); }
.b0 { background: var(--w0); } .b1 { background: var(--w1); } .b2 { background: var(--w2); }
.b3 { background: var(--w3); } .b4 { background: var(--w4); } .b5 { background: var(--w5); }
.b6 { background: var(--w6); } .b7 { background: var(--w7); } .b8 { background: var(--w8); }
.b9 { background: var(--w9); }
.t0 { --t: var(--t0); --b: var(--w0); } .t1 { --t: var(--t1); --b: var(--w1); } .t2 { --t: var(--t2); --b: var(--w2); }
.t3 { --t: var(--t3); --b: var(--w3); } .t4 { --t: var(--t4); --b: var(--w4); } .t5 { --t: var(--t5); --b: var(--w5); }
.t6 { --t: var(--t6); --b: var(--w6); } .t7 { --t: var(--t7); --b: var(--w7); } .t8 { --t: var(--t8); --b: var(--w8); }
.t9 { --t: var(--t9); --b: var(--w9); }
svg text.on { fill: var(--t); font-weight: 600; stroke: var(--b); stroke-width: 2px; }
.legend { font-size: 13px; color: var(--soft); margin: 4px 0; }
.swatch { display: inline-block; min-width: 22px; padding: 0 6px; border-radius: 3px; color: var(--t);
  font-weight: 600; text-align: center; }
details { margin: 6px 0 0; font-size: 13px; }
summary { color: var(--soft); cursor: pointer; width: fit-content; }
.scroll { overflow-x: auto; margin: 6px 0; }
table { border-collapse: separate; border-spacing: 0; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 10px 3px 0; border-bottom: 1px solid var(--grid); text-align: left; vertical-align: top;
  font-weight: 400; white-space: nowrap; }
thead th { color: var(--soft); font-weight: 500; border-bottom-color: var(--rule); vertical-align: bottom;
  white-space: normal; overflow-wrap: break-word; max-width: 16em; }
tbody th { position: sticky; left: 0; background: var(--page); }
tbody th.long { white-space: normal; overflow-wrap: break-word; max-width: min(20em, 40vw); }
.n { text-align: right; }
.wrap table { width: 100%; }
.wrap td { white-space: normal; overflow-wrap: anywhere; }
nav { margin-top: 16px; font-size: 14px; }
nav a { color: var(--s0); margin-right: 14px; white-space: nowrap; text-underline-offset: 3px; }
@page { margin: 14mm; }
@media print {
  * { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  body { font-size: 10pt; }
  main { max-width: none; padding: 0; }
  nav, summary { display: none; }
  h2, h3, figcaption, .note { break-after: avoid; }
  tr { break-inside: avoid; }
  .legend { break-before: avoid; }
  .tiles { grid-template-columns: repeat(4, 1fr); }
  .charts { grid-template-columns: 1fr 1fr; }
  .charts.small { grid-template-columns: repeat(4, 1fr); }
  .scroll { overflow: visible; }
  table, details { font-size: 7pt; }
  th, td { padding: 1px 5px 1px 0; }
  th, td:not(.n) { white-space: normal; }
  details::details-content { display: block; content-visibility: visible; block-size: auto; }
}
)css";

}  // namespace kvq
