"use strict";
// The status page: shows each snapshot that /status/events brings. Texts go into the page
// by textContent alone.
(() => {
  const subjects = 10; // that are shown
  const stale = 3500; // ms without a snapshot, after which weir is said not to answer
  const polling = 5000; // ms between two asks where the stream is not to be had
  const $ = (id) => document.getElementById(id);
  const number = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
  const words = { ok: "✔ All is well", note: "For your information", warn: "⚠ Warning", bad: "✖ Problem", wait: "" };

  let last = null; // the snapshot that is shown
  let lastAt = 0; // when one came, by performance.now()
  let patience = stale;
  let paused = false;
  let newest = null; // that came while paused

  // --- texts

  const count = (n) => number.format(n);
  const plural = (n, one, many) => `${count(n)} ${n === 1 ? one : many}`;
  function rate(n) {
    if (n === 0) return "0";
    if (n < 0.1) return "<0.1";
    return n < 10 ? n.toFixed(1) : count(n);
  }
  function clock(text) {
    const t = new Date(text);
    const day = t.toISOString().slice(0, 10);
    const today = (last ? new Date(last.at) : new Date()).toISOString().slice(0, 10);
    return `${day === today ? "" : day + " "}${t.toISOString().slice(11, 19)} UTC`;
  }
  function span(ms) {
    const s = Math.max(0, Math.floor(ms / 1000));
    if (s < 60) return `${s} s`;
    if (s < 3600) return `${Math.floor(s / 60)} min`;
    if (s < 48 * 3600) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
    return `${Math.floor(s / 86400)} days`;
  }
  const since = (at, text) => `${clock(text)} (${span(new Date(at) - new Date(text))})`;
  // whole keeps a number and its unit on one line.
  const whole = (text) => text.replace(/(\d) (s|min|h|days|UTC|of|requests?)\b/g, "$1\u00a0$2");
  const wait = (seconds) => (seconds < 100 ? `${seconds.toFixed(1)} s` : span(seconds * 1000));
  const millis = (n) => (n < 10 ? n.toFixed(2) : n < 100 ? n.toFixed(1) : count(n));

  // --- the page

  function set(node, text) {
    if (node.textContent !== text) node.textContent = text;
  }
  function make(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }
  const kept = new WeakMap(); // of a parent that sync fills, its children by key
  // sync has one child of parent for each item, in order, and keeps those that were there.
  function sync(parent, items, key, create, update) {
    const old = kept.get(parent) || new Map(), now = new Map();
    kept.set(parent, now);
    items.forEach((item, i) => {
      const k = key(item, i);
      const node = old.get(k) || create(item);
      old.delete(k);
      now.set(k, node);
      if (parent.children[i] !== node) parent.insertBefore(node, parent.children[i] || null);
      update(node, item);
    });
    for (const node of old.values()) node.remove();
  }
  const list = (parent, texts) => sync(parent, texts, (_, i) => i, () => make("li"), set);

  function banner(level, text, others) {
    $("banner").dataset.level = level;
    set($("level"), words[level]);
    // "All is well: ..." needs not be said twice.
    set($("headline"), whole(level === "ok" ? text.replace(/^All is well: ./, (s) => s.slice(-1).toUpperCase()) : text));
    list($("problems"), others.map(whole));
    $("problems").hidden = others.length === 0;
    const mark = { ok: "", warn: "⚠ ", bad: "✖ " }[level] || "";
    const title = `${mark}weir: ${text.split(":")[0]}`;
    if (document.title !== title) document.title = title;
    // It is read out when it says something else, not when its numbers change.
    const said = [words[level], text, ...others].join(". ");
    const gist = said.replace(/\([^)]*\)/g, "").replace(/\d[\d,.:]*/g, "");
    if ($("announce").gist !== gist) {
      $("announce").gist = gist;
      $("announce").textContent = said;
    }
  }

  function show(s) {
    last = s;
    $("picture").hidden = false;
    set($("replica"), [s.host, s.version && `weir ${s.version}`].filter(Boolean).join(" · ") || "status of this replica");
    set($("at"), `as of ${clock(s.at)}`);
    showBanner();
    showStore(s);
    showBypassed(s.bypassed);
    showPools(s);
    showRequests(s);
    sync($("domains"), s.domains, (d) => d.name, makeDomain, showDomain);
    $("more").hidden = s.more_limits === 0;
    set($("more"), `${plural(s.more_limits, "more limit is", "more limits are")} not shown; metrics have them.`);
    showLatency($("latency-decisions"), s.latency.decisions);
    showLatency($("latency-store"), s.latency.store);
    showPolicies(s);
    showSubjects(s);
    set($("started"), ` at ${clock(s.started)}`);
  }

  function showBanner() {
    const lost = lastAt !== 0 && performance.now() - lastAt > patience;
    if (!last) {
      if (performance.now() > patience) banner("bad", "weir itself does not answer", []);
      return;
    }
    const others = last.problems.filter((p) => p.text !== last.headline.text).map((p) => (p.level === "note" ? p.text : `${words[p.level]}: ${p.text}`));
    if (lost) {
      const at = (paused && newest ? newest : last).at;
      const text = `weir itself does not answer since ${clock(at)} (${span(performance.now() - lastAt)}); what is below is old`;
      banner("bad", text, [last.headline.text, ...others]);
      return;
    }
    banner(last.headline.level, last.headline.text, others);
  }

  const reasons = { store_timeout: "answered too late", store_unavailable: "could not be reached", store_error: "an error", hurried: "its caller had too little time left" };

  function showStore(s) {
    const name = s.store.kind === "memory" ? "memory (this process only)" : "Redis";
    const state = { up: s.store.kind === "memory" ? "" : " answers", away: s.store.silent ? " does not answer" : s.store.erring ? " answers with errors" : " fails some calls", not_found: " has not been found" }[s.store.state];
    set($("store"), name + state);
    set($("store-since"), since(s.at, s.store.since));
    const open = s.store.breakers.map((b) => `${b.domain} since ${clock(b.since)}`).join(", ");
    set($("breaker"), open ? `open: the store is not asked for ${open}` : "closed: the store is asked");
    set($("store-address"), s.store.address || "none");
    const e = s.store.last_error;
    set($("store-error"), e ? `${clock(e.at)}: ${e.word || reasons[e.reason] || e.reason}` : "none since start");
    const o = s.store.outage, hour = s.store.last_hour;
    if (!o) set($("outage"), "none since start");
    else if (!o.to) set($("outage"), `now, since ${clock(o.from)}`);
    else if (hour && o.late) set($("outage"), `until ${clock(hour.to)}; ${count(hour.unchecked)} passed unchecked in the last hour`);
    else if (o.late) set($("outage"), `none; some calls failed until ${clock(o.to)}`);
    else set($("outage"), `${clock(o.from)}, for ${span(new Date(o.to) - new Date(o.from))}; ${count(o.unchecked)} passed unchecked`);
  }

  function showBypassed(b) {
    set($("bypassed-rate"), rate(b.per_second));
    for (const when of ["today", "total"]) {
      for (const what of ["unchecked", "local", "refused"]) set($(`${when}-${what}`), count(b[when][what]));
    }
  }

  const poolsOf = (s) => s.domains.flatMap((d) => d.limits.flatMap((l) => poolsIn(l).map((pool) => ({ domain: d.name, name: l.pools.length > 1 ? pool.subject : l.name, pool }))));
  const poolsIn = (l) => l.pools || [];
  const known = (p) => p.in_flight !== null;
  const full = (p) => known(p) && p.in_flight >= p.capacity;
  const near = (p) => known(p) && p.in_flight * 10 >= p.capacity * 9;
  const held = (p) => (known(p) ? `${count(p.in_flight)} of ${count(p.capacity)}` : `? of ${count(p.capacity)}`);

  function showPools(s) {
    const pools = poolsOf(s);
    const at = pools.filter((l) => full(l.pool));
    let text = "none in the policies";
    if (at.length) text = `${count(at.length)} full${at.every((l) => l.pool.old) ? ` at ${clock(at[0].pool.at)}` : ""}`;
    else if (pools.length) text = pools.every((l) => known(l.pool) && !l.pool.old) ? "none is full" : "not known now";
    set($("pools"), text);
    const worst = [...pools].sort((a, b) => (b.pool.in_flight || 0) / b.pool.capacity - (a.pool.in_flight || 0) / a.pool.capacity).slice(0, 5);
    const texts = worst.map((l) => `${l.name}${s.domains.length > 1 ? " of " + l.domain : ""}: ${held(l.pool)}${full(l.pool) ? ", full" : ""}${l.pool.old ? ` at ${clock(l.pool.at)}` : ""}`);
    if (pools.length > worst.length) texts.push(`and ${count(pools.length - worst.length)} more`);
    list($("pool-list"), texts);
  }

  function showRequests(s) {
    const sum = (f) => s.domains.reduce((n, d) => n + f(d), 0);
    const admitted = sum((d) => d.admitted), refused = sum((d) => d.refused);
    const now = sum((d) => d.admitted_per_second + d.refused_per_second);
    set($("requests"), admitted + refused + s.unknown_domain.total === 0 ? "none yet" : `${rate(now)} a second`);
    set($("admitted"), `${count(admitted)} · ${rate(sum((d) => d.admitted_per_second))}/s`);
    set($("refused"), `${count(refused)} · ${rate(sum((d) => d.refused_per_second))}/s`);
    set($("leases"), s.domains.every((d) => d.leases_held !== null) ? count(sum((d) => d.leases_held)) : "not known now");
    set($("expired"), `${count(sum((d) => d.leases_expired))} · ${count(sum((d) => d.leases_expired_lately))} in 5 min`);
  }

  // --- domains

  const columns = ["In flight", "Passed", "Refused", "Would refuse", "Retry-After", "Without the store"];

  let ids = 0;
  function makeDomain(d) {
    const id = `domain-${++ids}`;
    const head = make("tr", { role: "row" }, make("th", { role: "columnheader", scope: "col" }, "Limit"));
    columns.forEach((c, i) => head.append(make("th", { role: "columnheader", scope: "col", class: i ? "num" : "" }, c)));
    const node = make("section", { "aria-labelledby": id, "data-domain": d.name },
      make("h2", { id }, `Domain ${d.name}`), make("p", { class: "sub" }),
      make("table", { class: "stack", role: "table", "aria-labelledby": id }, make("thead", { role: "rowgroup" }, head), make("tbody", { role: "rowgroup" })));
    return node;
  }

  function showDomain(node, d) {
    const heldText = d.leases_held === null ? "leases held: not known now" : `${plural(d.leases_held, "lease", "leases")} held`;
    set(node.querySelector(".sub"), `${count(d.admitted)} admitted (${rate(d.admitted_per_second)}/s), ${count(d.refused)} refused (${rate(d.refused_per_second)}/s), ${heldText}, ${count(d.leases_expired)} expired`);
    const table = node.querySelector("table");
    table.hidden = d.limits.length === 0;
    sync(table.tBodies[0], d.limits, (l) => `${l.kind} ${l.name}`, makeLimit, showLimit);
  }

  function makeLimit(l) {
    const row = make("tr", { role: "row", "data-limit": l.name, "data-kind": l.kind },
      make("th", { role: "rowheader", scope: "row" }, make("span", { class: "name" }), make("span", { class: "small kind" })));
    columns.forEach((c, i) => {
      const cell = make("td", { role: "cell", "data-label": c, class: i ? "num" : "pool" });
      if (i > 0) cell.append(make("span", {}, make("span", { class: "value" }), make("span", { class: "small" })));
      row.append(cell);
    });
    return row;
  }

  const kinds = { token_bucket: "token bucket", rate_limit: "window", concurrency: "in flight", "": "asked for by requests" };

  function showLimit(row, l) {
    set(row.querySelector(".name"), l.name);
    const of = { concurrency: ", " }[l.kind] || " of ";
    const each = l.capacity && !poolsIn(l).length ? `${of}${count(l.capacity)} each` : "";
    set(row.querySelector(".kind"), `${kinds[l.kind] || l.kind}${each}${l.shadow ? ", in shadow: refuses nobody" : ""}`);
    const [flight, ...cells] = row.querySelectorAll("td");
    flight.classList.toggle("empty", !poolsIn(l).length);
    const many = poolsIn(l).length > 1;
    sync(flight, poolsIn(l), (p) => p.subject,
      (p) => make("div", { "data-subject": p.subject }, make("span", { class: "value" }), make("div", { class: "bar" }, make("div"))),
      (node, p) => showFlight(node, p, many));
    const retry = l.retry_after;
    const texts = [
      [count(l.passed), `${rate(l.passed_per_second)}/s`],
      [count(l.refused), `${rate(l.refused_per_second)}/s`],
      l.shadow || l.would_refuse ? [count(l.would_refuse), `${count(l.would_refuse_last_minute)} in 1 min`] : ["", ""],
      retry ? [wait(retry.last_seconds), `mean ${wait(retry.mean_seconds)}`] : ["", ""],
      [count(l.bypassed), ""],
    ];
    cells.forEach((cell, i) => {
      set(cell.querySelector(".value"), texts[i][0]);
      set(cell.querySelector(".small"), texts[i][1]);
      cell.classList.toggle("empty", texts[i][0] === "");
    });
  }

  function showFlight(node, pool, many) {
    const bar = node.querySelector(".bar");
    let text = many ? `${pool.subject}: ${held(pool)}` : held(pool);
    if (full(pool)) text += ", full";
    else if (near(pool)) text += ", nearly full";
    if (pool.old) text += ` at ${clock(pool.at)}`;
    else if (!known(pool)) text += ": not known now";
    set(node.querySelector(".value"), text);
    bar.dataset.full = full(pool) ? "full" : near(pool) ? "near" : "";
    bar.firstChild.style.width = `${known(pool) ? Math.min(100, (100 * pool.in_flight) / pool.capacity) : 0}%`;
  }

  // --- latency

  const lines = ["p50", "p95", "p99"];
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  function makeChart(box, width) {
    const axis = { stroke: color("muted"), grid: { stroke: color("edge"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const dashes = [[], [8, 4], [2, 3]];
    return new uPlot({
      width, height: 190, cursor: { show: false }, legend: { show: false },
      tzDate: (t) => uPlot.tzDate(new Date(t * 1000), "Etc/UTC"),
      scales: { x: { time: true, range: (u, min, max) => [max - 300, max] }, y: { distr: 3, range: (u, min, max) => [min === null ? 0.1 : 10 ** Math.floor(Math.log10(min)), max === null ? 1 : 10 ** Math.ceil(Math.log10(max) + 0.01)] } },
      axes: [{ ...axis, values: (u, ticks) => ticks.map((t) => new Date(t * 1000).toISOString().slice(11, 16)), incrs: [60, 120] },
        { ...axis, size: 58, values: (u, ticks) => ticks.map((t) => (Number.isInteger(Math.log10(t)) ? `${t} ms` : "")) }],
      series: [{}, ...lines.map((p, i) => ({ label: p, stroke: color(p), width: 2, dash: dashes[i], points: { size: 4 } }))],
    }, [[], [], [], []], box);
  }

  function showLatency(figure, l) {
    const [p50, p95, p99] = l.all;
    set(figure.querySelector(".sum"), l.all.length ? `p50 ${millis(p50)} ms · p95 ${millis(p95)} ms · p99 ${millis(p99)} ms, of ${count(l.count)}` : "none in the last 5 minutes");
    figure.latency = l;
    const box = figure.querySelector(".chart");
    box.hidden = !l.all.length;
    figure.querySelector("details").hidden = !l.all.length;
    drawChart(figure);
    showNumbers(figure);
  }

  function drawChart(figure) {
    const l = figure.latency, box = figure.querySelector(".chart");
    const key = `${l.times.length}-${l.times.at(-1)}-${box.clientWidth}-${color("card")}`;
    if (box.hidden || box.key === key || !box.clientWidth) return;
    if (!l.times.length || !l.p50.some((v) => v !== null)) {
      set(box, "the chart begins within 10 seconds");
      return;
    }
    if (!box.chart || box.colors !== color("card")) {
      box.replaceChildren();
      box.chart = makeChart(box, box.clientWidth);
      box.colors = color("card");
    }
    box.key = key;
    box.chart.setSize({ width: box.clientWidth, height: 190 });
    box.chart.setData([l.times, l.p50, l.p95, l.p99]);
  }

  function showNumbers(figure) {
    const details = figure.querySelector("details"), l = figure.latency;
    if (!details.open || !l) return;
    const text = (v) => (v === null ? "–" : millis(v));
    const rows = l.times.map((t, i) => [new Date(t * 1000).toISOString().slice(11, 19), text(l.p50[i]), text(l.p95[i]), text(l.p99[i])]).reverse();
    sync(details.querySelector("tbody"), rows, (r) => r[0],
      () => make("tr", {}, make("th", { scope: "row" }), make("td"), make("td"), make("td")),
      (node, r) => r.forEach((v, i) => set(node.children[i], v)));
  }

  // --- policies and subjects

  function showPolicies(s) {
    const p = s.policies;
    set($("version"), p.version || "none loaded");
    set($("loaded"), p.loaded_at ? since(s.at, p.loaded_at) : "never");
    let text = "none since start";
    if (p.failed_at) text = `${clock(p.failed_at)}; ${p.wrong_files ? `${plural(p.wrong_files, "file is", "files are")} wrong now` : "right again since"}`;
    set($("load-error"), text);
    list($("load-errors"), p.errors);
    list($("files"), s.domains.map((d) => `domain ${d.name}: ${d.file}`));
  }

  function showSubjects(s) {
    const some = s.refused.length > 0;
    $("no-subjects").hidden = some;
    $("subjects").hidden = !some;
    const many = s.domains.length > 1;
    sync($("subjects").tBodies[0], s.refused.slice(0, subjects), (r) => `${r.domain}/${r.limit}/${r.subject}`,
      () => make("tr", { role: "row" }, make("th", { role: "rowheader", scope: "row", class: "mono" }),
        make("td", { role: "cell", "data-label": "Limit" }), make("td", { role: "cell", class: "num", "data-label": "Refused" }), make("td", { role: "cell", class: "num", "data-label": "Last" })),
      (node, r) => {
        const texts = [r.subject, many ? `${r.limit} of ${r.domain}` : r.limit, r.over ? `${count(r.count - r.over)} to ${count(r.count)}` : count(r.count), clock(r.last)];
        texts.forEach((v, i) => set(node.children[i], v));
      });
    const more = s.refused.length - subjects;
    $("more-subjects").hidden = more <= 0;
    set($("more-subjects"), `${plural(more, "more is", "more are")} in status.json.`);
  }

  // --- pause

  function pause() {
    paused = !paused;
    $("paused").hidden = !paused;
    $("pause").firstChild.textContent = paused ? "Continue " : "Pause ";
    if (paused) {
      set($("paused"), `Paused since ${clock(last ? last.at : new Date())}: what is below stands still.`);
    } else if (newest) {
      show(newest);
      newest = null;
    }
  }
  $("pause").addEventListener("click", pause);
  document.addEventListener("keydown", (e) => {
    if (e.key.toLowerCase() === "p" && !e.ctrlKey && !e.metaKey && !e.altKey && !e.repeat) pause();
  });

  // --- the stream

  function take(text) {
    const s = JSON.parse(text);
    lastAt = performance.now();
    if (paused && last) newest = s;
    else show(s);
  }

  function connect() {
    const stream = new EventSource("status/events");
    stream.onmessage = (e) => {
      patience = stale;
      $("polled").hidden = true;
      take(e.data);
    };
    stream.onerror = () => {
      if (stream.readyState !== EventSource.CLOSED) return; // it tries again
      stream.close();
      poll().finally(() => setTimeout(connect, polling));
    };
  }

  // poll asks once: the stream is refused, since too many watch, or weir is about to stop.
  async function poll() {
    try {
      const answer = await fetch("status.json");
      if (!answer.ok) return;
      patience = 2 * polling + stale;
      take(await answer.text());
      $("polled").hidden = false;
    } catch {
      // the watch below says so
    }
  }

  setInterval(() => {
    showBanner();
  }, 500);
  const redraw = () => document.querySelectorAll("figure").forEach((f) => f.latency && drawChart(f));
  new ResizeObserver(redraw).observe($("main"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  document.querySelectorAll("details").forEach((d) => d.addEventListener("toggle", () => showNumbers(d.closest("figure"))));
  connect();
})();
