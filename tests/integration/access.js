// What a program can check of a page for those who see little, or use no mouse: one function each, called by a test.
({
  /** Elements with text of their own that is to be seen, with the contrast to what lies behind them. */
  contrasts() {
    const parts = (colour) => {
      const [r, g, b, a = 1] = colour.match(/[\d.]+/g).map(Number);
      return { rgb: [r, g, b], a };
    };
    const over = (top, back) => top.rgb.map((value, at) => value * top.a + back[at] * (1 - top.a));
    const linear = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
    const behind = (element) => {
      const layers = [];
      for (let each = element; each; each = each.parentElement) layers.unshift(parts(getComputedStyle(each).backgroundColor));
      return layers.reduce((back, layer) => over(layer, back), [255, 255, 255]);
    };
    const found = [];
    for (const element of document.querySelectorAll("body *")) {
      const text = [...element.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE).map((node) => node.textContent.trim()).join("");
      if (!text || element.disabled || !element.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
      const style = getComputedStyle(element);
      const back = behind(element);
      const colour = over(parts(element instanceof SVGElement ? style.fill : style.color), back);
      const [most, least] = [light(colour), light(back)].sort((a, b) => b - a);
      found.push([(most + 0.05) / (least + 0.05), `${element.tagName} ${element.getAttribute("class") ?? ""}: ${text.slice(0, 40)}`]);
    }
    return found;
  },

  /** What lacks a name, a role, words or heads, comes twice, or moves. */
  faults() {
    const seen = (selector) => [...document.querySelectorAll(selector)].filter((each) => each.checkVisibility());
    const start = (each) => each.outerHTML.slice(0, 100);
    const named = (each) => each.getAttribute("aria-label") || each.labels?.length || each.textContent.trim() || each.querySelector("title");
    const hidden = (each) => each.closest("[aria-hidden=true]");
    const faults = [];
    for (const each of seen("a[href], button, input, select, table, [role=slider], [role=region], [role=group]")) if (!named(each)) faults.push(`no name: ${start(each)}`);
    for (const each of seen("svg, canvas")) if (!hidden(each) && !each.querySelector("title") && !each.getAttribute("aria-label")) faults.push(`no words: ${start(each)}`);
    for (const each of seen("img")) if (!each.hasAttribute("alt")) faults.push(`no words: ${start(each)}`);
    for (const each of seen("table")) {
      const heads = [...each.querySelectorAll("thead th")];
      if (!heads.length || heads.some((head) => head.scope !== "col" || !head.textContent.trim())) faults.push(`heads: ${start(each)}`);
    }
    for (const each of seen("th button")) {
      if (!["none", "ascending", "descending"].includes(each.parentElement.getAttribute("aria-sort"))) faults.push(`aria-sort: ${start(each)}`);
    }
    for (const each of seen("[role=slider]")) if (!each.getAttribute("aria-valuetext")) faults.push(`no value: ${start(each)}`);
    for (const each of ["header", "nav", "main", "h1"]) if (seen(each).length !== 1) faults.push(`${seen(each).length} of ${each}`);
    if (!document.documentElement.lang) faults.push("no language");
    const ids = [...document.querySelectorAll("[id]")].map((each) => each.id);
    faults.push(...ids.filter((id, at) => ids.indexOf(id) !== at).map((id) => `twice: ${id}`));
    for (const each of document.getAnimations()) faults.push(`moves: ${start(each.effect.target)}`);
    return faults;
  },

  /** Where the focus is, and whether that is to be seen. */
  focus() {
    const each = document.activeElement;
    const style = getComputedStyle(each);
    const { left, right, top, bottom } = each.getBoundingClientRect();
    const inside = right > 0 && left < innerWidth && bottom > 0 && top < innerHeight;
    return [each.tagName, each.getAttribute("aria-label") ?? each.textContent.trim().slice(0, 40), inside && style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2];
  },
})
