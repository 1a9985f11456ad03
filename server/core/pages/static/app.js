// Optional additions to pages: copying, colour themes without a reload, keyboard shortcuts, and messages about parts
// that failed to load.
"use strict";

(() => {
  const root = document.documentElement;
  root.classList.add("has-script");

  // Return the present value of a colour token (light or dark theme) as rgb(), for canvas drawings.
  const probe = document.createElement("i");
  probe.hidden = true;
  window.colourOf = (token) => {
    if (!probe.isConnected) document.body.append(probe);
    probe.style.color = `var(${token})`;
    return getComputedStyle(probe).color;
  };

  // Escape characters that change the text direction, as the service does.
  window.visible = (text) => text.replace(/[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);

  // Over HTTP/1.1 a browser opens six connections to a service for all tabs, so hidden tabs close their stream.
  class Stream {
    constructor(url) {
      this.url = url;
      this.listeners = [];
      this.look = () => (document.hidden ? this.source?.close() : this.follow("state")); // the state may have changed while hidden
      document.addEventListener("visibilitychange", this.look);
      if (!document.hidden) this.follow();
    }

    follow(missed) {
      this.source?.close();
      const source = (this.source = new EventSource(this.url));
      source.onopen = (event) => this.onopen?.(event);
      source.onerror = (event) => {
        if (source.readyState === EventSource.CLOSED) this.close(); // htmx opens a new stream
        this.onerror?.(event);
      };
      for (const [name, listener] of this.listeners) {
        source.addEventListener(name, listener);
        if (name === missed) listener(new MessageEvent(name));
      }
    }

    get readyState() {
      return this.source ? this.source.readyState : EventSource.CONNECTING;
    }

    addEventListener(name, listener) {
      this.listeners.push([name, listener]);
      this.source?.addEventListener(name, listener);
    }

    removeEventListener(name, listener) {
      this.listeners = this.listeners.filter((one) => one[0] !== name || one[1] !== listener);
      this.source?.removeEventListener(name, listener);
    }

    close() {
      document.removeEventListener("visibilitychange", this.look);
      this.source?.close();
    }
  }
  if (window.htmx) {
    htmx.createEventSource = (url) => new Stream(url);
    // htmx logs events with an error to the console. A request replaced by a newer one is not an error, and other
    // failures are logged by their own events.
    htmx.logger = (element, name, detail) => {
      if (name === "htmx:sendAbort" || name === "htmx:afterRequest") delete detail.error;
    };
  }

  const status = document.getElementById("status");
  let clearing = 0;
  const say = (text) => {
    const line = document.createElement("p");
    line.textContent = text;
    status.replaceChildren(line);
    clearTimeout(clearing);
    clearing = setTimeout(() => status.replaceChildren(), 4000);
  };

  const put = async (text) => {
    if (navigator.clipboard && window.isSecureContext) return navigator.clipboard.writeText(text);
    const area = document.createElement("textarea"); // the clipboard API needs HTTPS or localhost
    area.value = text;
    document.body.append(area);
    area.select();
    const isDone = document.execCommand("copy");
    area.remove();
    if (!isDone) throw new Error("not copied");
  };

  const copied = (button) => {
    if (button.dataset.text !== undefined) return button.dataset.text; // exact text, if displayed in another form
    const of = button.dataset.copy ? document.getElementById(button.dataset.copy) : button.previousElementSibling;
    return of.textContent.trim();
  };

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (button) {
      try {
        await put(copied(button));
        button.classList.add("done");
        setTimeout(() => button.classList.remove("done"), 1500);
        say("Copied");
      } catch {
        say("The browser did not allow to copy");
      }
    }
    for (const menu of document.querySelectorAll("details.menu[open]")) {
      if (!menu.contains(event.target)) menu.open = false;
    }
  });

  const following = { system: "light", light: "dark", dark: "system" };
  const themed = (button) => {
    const theme = root.dataset.theme;
    button.value = following[theme];
    button.title = `Colors: ${theme}`;
    button.setAttribute("aria-label", `Colors: ${theme}. Change to ${following[theme]}`);
  };
  document.addEventListener("submit", (event) => {
    const button = event.submitter;
    if (!button || !("themeButton" in button.dataset)) return;
    event.preventDefault();
    root.dataset.theme = button.value;
    const secure = location.protocol === "https:" ? "; secure" : "";
    document.cookie = `dcphub_theme=${button.value}; path=/; max-age=31536000; samesite=lax${secure}`;
    themed(button);
    document.dispatchEvent(new CustomEvent("themed"));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new CustomEvent("themed")));

  document.addEventListener("change", (event) => {
    if ("submits" in event.target.dataset) event.target.form.requestSubmit();
  });

  document.addEventListener("keydown", (event) => {
    const isTyping = event.target.closest("input, textarea, select, [contenteditable]");
    if (event.key === "/" && !isTyping && !event.ctrlKey && !event.metaKey && !event.altKey) {
      const find = document.getElementById("find");
      if (find) {
        event.preventDefault();
        find.focus();
        find.select();
      }
    } else if (event.key === "Escape") {
      for (const menu of document.querySelectorAll("details.menu[open]")) {
        if (menu.contains(document.activeElement)) menu.querySelector("summary").focus();
        menu.open = false;
      }
      if (event.target.closest(".find")) document.activeElement.blur();
    } else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      const find = event.target.closest(".find");
      if (!find) return;
      const places = [document.getElementById("find"), ...find.querySelectorAll("#found a")];
      const next = places[places.indexOf(document.activeElement) + (event.key === "ArrowDown" ? 1 : -1)];
      if (next) {
        event.preventDefault();
        next.focus();
      }
    }
  });

  // The response for a part of the page lacks text typed since the request: restore the text and send a new request.
  let typed = null;
  document.addEventListener("htmx:beforeSwap", ({ detail }) => {
    const field = document.activeElement;
    const isSwapped = field.matches("input[id]") && detail.target.contains(field);
    const sent = isSwapped && detail.requestConfig.parameters[field.name];
    typed = isSwapped && (sent || "") !== field.value ? { id: field.id, value: field.value } : null;
  });
  document.addEventListener("htmx:afterSettle", () => {
    const field = typed && document.getElementById(typed.id);
    if (field) {
      field.value = typed.value;
      field.dispatchEvent(new Event("input", { bubbles: true }));
    }
    typed = null;
  });

  document.addEventListener("htmx:responseError", (event) => {
    const code = event.detail.xhr.status;
    if (code !== 401) say(code === 503 ? "The service is unavailable: retry in a moment" : `The service responded with status ${code}: reload the page`);
  });
  document.addEventListener("htmx:sendError", () => say("The service cannot be reached"));
})();
