// Page of a run in training: a stream reports changes of the run, and the parts of the page are loaded again. A part in
// use (with a ticked box or a focused field) waits until the user requests the update.
"use strict";

(() => {
  const live = document.querySelector("[data-live]");
  if (!live || !window.htmx) return;
  const PARTS = ["live-activity", "live-facts", "live-notices", "live-steps", "live-metric", "checkpoints"];
  const PAUSE = 3000;
  let updated = live.dataset.updated;
  let isReading = false;
  let wanted = null; // the change to read next
  let next = 0;
  let timer = 0;

  const isUsed = (part) => part.querySelector(":checked:not(option)") !== null || (part.contains(document.activeElement) && document.activeElement.matches("input, select, textarea"));

  const keep = (old, fresh) => {
    const before = [...old.querySelectorAll("details")];
    [...fresh.querySelectorAll("details")].forEach((one, index) => {
      if (before[index]) one.open = before[index].open;
    });
  };

  const replace = (old, fresh) => {
    keep(old, fresh);
    const tops = [...old.querySelectorAll(".scroll")].map((one) => [one.scrollTop, one.scrollLeft]);
    const focused = old.contains(document.activeElement) && document.activeElement.id;
    old.replaceWith(fresh);
    [...fresh.querySelectorAll(".scroll")].forEach((one, index) => {
      if (tops[index]) [one.scrollTop, one.scrollLeft] = tops[index];
    });
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
    htmx.process(fresh);
    fresh.dispatchEvent(new CustomEvent("htmx:load", { bubbles: true, detail: { elt: fresh } }));
  };

  const read = async (isAsked) => {
    clearTimeout(timer);
    isReading = true;
    const change = wanted;
    try {
      const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
      if (!answer.ok || new URL(answer.url).pathname !== location.pathname) {
        wanted = null; // signed out, or the run no longer exists
        return;
      }
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const waiting = document.getElementById("live-waiting");
      let isLeft = false;
      for (const id of PARTS) {
        const old = document.getElementById(id);
        const fresh = page.getElementById(id);
        if (!old || !fresh || old.outerHTML === fresh.outerHTML) continue;
        if (isUsed(old) && !isAsked) isLeft = true;
        else replace(old, document.adoptNode(fresh));
      }
      waiting.hidden = !isLeft;
      updated = page.querySelector("[data-live]")?.dataset.updated ?? change;
      if (wanted === change) wanted = null;
      look();
    } catch {
      wanted = null; // the service is unreachable: the stream reports changes after it has reconnected
    } finally {
      isReading = false;
      next = Date.now() + PAUSE;
      if (wanted !== null) soon();
    }
  };

  const soon = () => {
    if (isReading || document.hidden) return;
    clearTimeout(timer);
    timer = setTimeout(read, Math.max(0, next - Date.now()));
  };

  const changed = (event) => {
    if (!event.data) return;
    const at = JSON.parse(event.data).updated_at;
    if (at === updated) return;
    wanted = at;
    soon();
  };

  // Texts that depend on the present time: ages, and a late next checkpoint.
  const UNITS = [[60, "s"], [3600, "min"], [86400, "h"], [30 * 86400, "d"], [365 * 86400, "mo"]];
  const span = (seconds) => {
    let unit = 1;
    for (const [end, name] of UNITS) {
      if (seconds < end) return `${Math.round(seconds / unit)} ${name}`;
      unit = end;
    }
    return `${(seconds / unit).toFixed(1)} y`;
  };
  const skew = Date.now() / 1000 - Number(live.dataset.now);
  const now = () => Date.now() / 1000 - skew;
  let due = null;
  const look = () => {
    due = Number(document.getElementById("live-activity").dataset.until) || null;
  };
  const age = () => {
    if (document.hidden) return;
    for (const one of live.querySelectorAll("#live-activity time, #live-facts time")) {
      const seconds = now() - Date.parse(one.dateTime) / 1000;
      const text = Math.abs(seconds) < 10 ? "just now" : seconds >= 0 ? `${span(seconds)} ago` : `in ${span(-seconds)}`;
      if (one.textContent !== text) one.textContent = text;
    }
    if (due !== null && now() > due) {
      due = null;
      wanted ??= updated;
      soon();
    }
  };
  look();
  setInterval(age, 5000);

  document.addEventListener("click", (event) => {
    if (event.target.closest("[data-live-show]")) read(true);
  });
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && wanted !== null) soon();
  });
  const stream = htmx.createEventSource(live.dataset.live);
  for (const name of ["ready", "changed"]) stream.addEventListener(name, changed);
})();
