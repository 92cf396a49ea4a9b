package dataplane

// Watcher detects and repairs what another program changed in the kernel.
type Watcher interface {
	// Drifted receives when another program may have changed the dataplane's objects.
	// The caller then calls Replace, at a time of its choice. Drifted is nil for a
	// dataplane that the kernel does not notify.
	Drifted() <-chan struct{}

	// Repaired returns what syncs repaired since the last call. The goroutine that
	// syncs calls it after each sync.
	Repaired() Repair
}

// Repair is what another program had changed in the kernel, counted in the dataplane's
// own objects (elements, rules, chains ...).
type Repair struct {
	Missing int    // objects that were deleted or changed
	Foreign int    // objects that another program added
	Found   string // description of the first of them; "" if there are none
}

// Any reports whether there was anything to repair.
func (r Repair) Any() bool { return r.Missing+r.Foreign > 0 }

// Add adds the result of another comparison.
func (r *Repair) Add(more Repair) {
	if r.Found != "" && more.Found != "" {
		more.Found = "; " + more.Found
	}
	r.Missing, r.Foreign, r.Found = r.Missing+more.Missing, r.Foreign+more.Foreign, r.Found+more.Found
}

// Note adds missing and foreign objects, and describes the first of them.
func (r *Repair) Note(missing, foreign int, what string) {
	if r.Found == "" && missing+foreign > 0 {
		r.Found = what
	}
	r.Missing, r.Foreign = r.Missing+missing, r.Foreign+foreign
}
