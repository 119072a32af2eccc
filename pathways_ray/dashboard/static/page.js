// The page: one stream of server-sent events, each of which replaces a section. Texts are set as texts, never as markup.
"use strict";

const at = (id) => document.getElementById(id);

function make(kind, text, name) {
  const made = document.createElement(kind);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
}

function colour(text) {
  let hash = 0;
  for (const letter of text) hash = (hash * 31 + letter.codePointAt(0)) % 360;
  return `hsl(${(hash * 137) % 360} 60% 55%)`;
}

function table(id, columns, rows) {
  const head = make("thead"), line = make("tr"), body = make("tbody");
  for (const column of columns) line.append(make("th", column));
  head.append(line);
  for (const cells of rows) {
    const row = make("tr");
    for (const cell of cells) row.append(make("td", cell));
    body.append(row);
  }
  at(id).replaceChildren(head, body);
}

function bytes(count) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (count >= size) return `${(count / size).toFixed(1)} ${unit}`;
  }
  return `${count}`;
}

function devices(islands) {
  const made = islands.map((island) => {
    const box = make("div", undefined, "island");
    const reason = island.reason ? `: ${island.reason}` : "";
    box.append(make("div", `island ${island.island} (${island.platform}) ${island.state}${reason}`, `state-${island.state}`));
    for (const host of island.hosts) {
      const frame = make("div", undefined, host.up ? "host" : "host down");
      frame.title = `host ${host.host}${host.up ? "" : " is down"}`;
      for (const [name, slices, runs] of host.devices) {
        const cell = make("div", undefined, runs ? "device runs" : "device");
        if (slices.length) cell.style.backgroundColor = colour(slices[0].split(":")[0]);
        cell.title = `${name}\nheld by ${slices.join(", ") || "nobody"}\n${runs ? `first on it: ${runs}` : "nothing on it"}`;
        frame.append(cell);
      }
      box.append(frame);
    }
    return box;
  });
  at("grid").replaceChildren(...made);
}

const MOST = 6;

function health(findings) {
  const lines = findings.slice(0, MOST).map((one) => make("li", `${one.severity}: ${one.what}. ${one.do}`, one.severity));
  if (findings.length > MOST) lines.push(make("li", `and ${findings.length - MOST} more`, "warning"));
  at("health").replaceChildren(...(lines.length ? lines : [make("li", "healthy", "good")]));
}

function programs(found) {
  const open = new Set([...document.querySelectorAll("#programs details[open]")].map((one) => one.dataset.key));
  at("programs").replaceChildren(...found.map((program) => {
    const box = make("details"), last = program.failure ? `, ${program.failure}` : "";
    box.dataset.key = program.key;
    box.open = open.has(String(program.key));
    box.append(make("summary", `${program.name} (session ${program.session}): ${program.launches} launches, ` +
      `${program.in_flight} in flight, compiled on ${program.ready} of ${program.hosts} hosts${last}`));
    if (program.nodes.length) box.append(graphOf(program.nodes, program.edges));
    return box;
  }));
}

const MATRIX = 32;

function transfers(moved) {
  const hosts = [...new Set(moved.flatMap(([a, b]) => [a, b]))].sort((a, b) => a - b).slice(0, MATRIX);
  const most = Math.max(1, ...moved.map((one) => one[2])), size = new Map(moved.map(([a, b, n]) => [`${a} ${b}`, n]));
  const grid = make("table", undefined, "matrix"), head = make("tr");
  head.append(make("th", "from \\ to"), ...hosts.map((host) => make("th", host)));
  grid.append(head);
  for (const from of hosts) {
    const row = make("tr");
    row.append(make("th", from));
    for (const to of hosts) {
      const count = size.get(`${from} ${to}`) || 0, cell = make("td", count ? bytes(count) : "");
      if (count) cell.style.backgroundColor = `rgb(60 130 200 / ${0.15 + 0.6 * count / most})`;
      row.append(cell);
    }
    grid.append(row);
  }
  at("transfers").replaceChildren(hosts.length ? grid : make("p", "nothing between hosts so far"));
}

function logs(processes) {
  const chosen = at("logs").value;
  at("logs").replaceChildren(make("option", ""), ...processes.map((name) => make("option", name)));
  at("logs").value = chosen;
}

const SECTIONS = {
  devices, health, programs, transfers, logs,
  totals: (one) => {
    at("totals").textContent = `${one.islands} islands, ${one.hosts} hosts, ${one.sessions} sessions, ` +
      `${one.launches === undefined || one.launches === null ? "" : `${one.launches} launches, `}` +
      `${one.in_flight} in flight, ${one.buffers} buffers${one.policy ? `, policy ${one.policy}` : ""}`;
  },
};
for (const name of ["tenants", "sessions", "launches", "queue", "memory", "events"]) {
  SECTIONS[name] = (found) => table(name, found.columns, found.rows);
}

function state(text, name) {
  at("state").textContent = text;
  at("state").className = name;
}

const AGAIN_MS = 5000;

function connect() {
  const stream = new EventSource("/events");
  for (const [name, show] of Object.entries(SECTIONS)) {
    stream.addEventListener(name, (event) => { show(JSON.parse(event.data)); state("live", "live"); document.body.dataset[name] = "shown"; });
  }
  stream.addEventListener("away", (event) => {
    const why = JSON.parse(event.data);
    state(why ? `the controller is away: ${why}` : "live", why ? "away" : "live");
  });
  stream.onerror = () => {
    state("the page's server is away; connects again …", "away");
    // Of a refusal, as for one page too many, the browser makes no further attempt.
    if (stream.readyState === EventSource.CLOSED) setTimeout(connect, AGAIN_MS);
  };
}

connect();

at("launches").addEventListener("click", async (event) => {
  const row = event.target.closest("tbody tr");
  if (!row) return;
  const answer = await fetch(`/why?launch=${encodeURIComponent(row.cells[0].textContent)}`);
  let text = await answer.text();
  if (answer.ok) {
    const found = JSON.parse(text);
    text = [...(found.links || []).map((link, k) => (k ? "   because " : "") + link.text), ...(found.story || [])].join("\n");
  }
  at("why").hidden = false;
  at("why").textContent = text;
});

at("logs").addEventListener("change", async () => {
  const answer = await fetch(`/log?process=${encodeURIComponent(at("logs").value)}`);
  at("log").textContent = await answer.text();
});
