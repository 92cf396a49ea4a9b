package node

// followNAT makes the programs look up packets of endpoints in conntrack while
// netfilter may translate destinations here. Netfilter must see both directions of a
// connection that it translates: if an endpoint is also a pod with a hostPort,
// netfilter must translate its replies back.
func (w *Writer) followNAT() {
	w.stopNAT = func() {}
	if w.cfg.WatchNAT == nil {
		return
	}
	stop, err := w.cfg.WatchNAT(w.OnNAT)
	if err != nil {
		// A lookup for each packet is slower, but correct.
		w.cfg.Log.Error("Follow netfilter's rules", "err", err)
		w.OnNAT(true, "rules are not followed")
		return
	}
	w.stopNAT = stop
}

// OnNAT is called when netfilter starts or stops translating destinations.
func (w *Writer) OnNAT(may bool, reason string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if may != w.askConntrack {
		if may {
			w.cfg.Log.Info("netfilter may translate destinations: packets of endpoints are looked up in conntrack", "reason", reason)
		} else {
			w.cfg.Log.Info("netfilter translates no destinations: packets of endpoints are not looked up in conntrack")
		}
	}
	w.askConntrack = may
	if w.node == nil {
		return // the first Replace writes the settings
	}
	if err := w.writeSettings(w.node); err != nil {
		w.cfg.Log.Error("Write settings", "err", err)
	}
}
