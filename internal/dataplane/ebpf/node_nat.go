package ebpf

// followNAT makes the programs look up packets of endpoints in conntrack while
// netfilter may translate destinations here. Netfilter must see both directions of a
// connection that it translates: if an endpoint is also a pod with a hostPort,
// netfilter must translate its replies back.
func (b *Backend) followNAT() {
	b.stopNAT = func() {}
	if b.cfg.WatchNAT == nil {
		return
	}
	stop, err := b.cfg.WatchNAT(b.onNAT)
	if err != nil {
		// A lookup for each packet is slower, but correct.
		b.cfg.Log.Error("Follow netfilter's rules", "err", err)
		b.onNAT(true, "rules are not followed")
		return
	}
	b.stopNAT = stop
}

// onNAT is called when netfilter starts or stops translating destinations.
func (b *Backend) onNAT(may bool, reason string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if may != b.askConntrack {
		if may {
			b.cfg.Log.Info("netfilter may translate destinations: packets of endpoints are looked up in conntrack", "reason", reason)
		} else {
			b.cfg.Log.Info("netfilter translates no destinations: packets of endpoints are not looked up in conntrack")
		}
	}
	b.askConntrack = may
	if b.node == nil {
		return // the first Replace writes the settings
	}
	if err := b.writeSettings(b.node); err != nil {
		b.cfg.Log.Error("Write settings", "err", err)
	}
}
