// SPDX-License-Identifier: Apache-2.0
// For readers who use the keyboard or a screen reader: what scrolls can be reached, and captions have a level.
document.addEventListener("DOMContentLoaded", () => {
  for (const caption of document.querySelectorAll("p.caption[role=heading]")) caption.setAttribute("aria-level", "2");
  for (const box of document.querySelectorAll("pre, .table-wrapper, .window-frame")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  }
  // The lines of a long signature are a list of definitions without terms.
  for (const part of document.querySelectorAll("dt.sig dl, dt.sig dl > dd")) part.setAttribute("role", "presentation");
});
