package flows

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
)

// demand is which flows the kernel reports with EventsOnDemand.
type demand struct {
	on atomic.Bool

	mu     sync.Mutex
	closed bool
	some   func(intent.PortID) bool // nil: of all Services, or of none
	set    func(objects.TCSettingsFlags) error
}

// close ends all switching.
func (d *demand) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed, d.some = true, nil
}

const (
	reportRefused = objects.TCSettingsFlagsSETTING_EVENTS_REFUSED
	reportFlows   = reportRefused | objects.TCSettingsFlagsSETTING_EVENTS_FLOWS
	reportSome    = reportFlows | objects.TCSettingsFlagsSETTING_EVENTS_SELECTED
)

// Switch has the kernel report the flows of these Service ports: see dataplane.FlowSwitch. set writes
// the settings about events. If there are more ports than reported_services has room for, all are
// reported: watchers filter, too.
func (t *Table) Switch(of dataplane.FlowSelection, set func(objects.TCSettingsFlags) error) error {
	d := &t.events.demand
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return errors.New("report flows: the dataplane has ended")
	}
	d.set = set
	if !of.All && of.Some == nil {
		return t.switchOff()
	}
	if !d.on.Load() {
		t.events.open.clear()
	}
	if of.All {
		return t.reportAll()
	}
	wanted := t.services.Selected(of.Some)
	if err := t.addReported(wanted); objects.IsFull(err) {
		return t.reportAll()
	} else if err != nil {
		return err
	}
	if err := set(reportSome); err != nil {
		return err
	}
	d.some = of.Some
	d.on.Store(true)
	return t.keepReported(wanted)
}

// reportAll leaves the map of selected Services as it is: the next selection replaces it. The caller
// holds demand.mu.
func (t *Table) reportAll() error {
	d := &t.events.demand
	if err := d.set(reportFlows); err != nil {
		return err
	}
	d.some = nil
	d.on.Store(true)
	return nil
}

// switchOff turns events of flows off. Flows that go on have no counters from now on, and those of the
// next flow with the same addresses begin at 0. The caller holds demand.mu.
func (t *Table) switchOff() error {
	d := &t.events.demand
	if err := d.set(reportRefused); err != nil {
		return err
	}
	d.some = nil
	d.on.Store(false)
	t.events.open.clear()
	return errors.Join(t.keepReported(nil), t.clearFlowBytes())
}

// ServiceAdded has the flows of a new Service port reported, if it is selected.
func (t *Table) ServiceAdded(id uint32, port intent.PortID) {
	d := &t.events.demand
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.some == nil || !d.some(port) {
		return
	}
	err := t.addReported([]uint32{id})
	if objects.IsFull(err) {
		err = t.reportAll()
	}
	if err != nil {
		t.cfg.Log.Warn("flows of a new Service are not reported", "service", port.Service.String(), "err", err)
	}
}

func (t *Table) addReported(services []uint32) error {
	for _, id := range services {
		if err := t.m(objects.TCMapReportedServices).Put(id, uint8(1)); err != nil {
			return fmt.Errorf("select a Service for flow events: %w", err)
		}
	}
	return nil
}

// keepReported removes all but these Services from the selection.
func (t *Table) keepReported(services []uint32) error {
	kept := make(map[uint32]bool, len(services))
	for _, id := range services {
		kept[id] = true
	}
	return objects.RemoveIf(t.m(objects.TCMapReportedServices), func(id uint32, _ uint8) bool { return !kept[id] })
}

func (t *Table) clearFlowBytes() error {
	return objects.RemoveIf(t.m(objects.TCMapFlowBytes), func(objects.TCTuple, objects.TCTraffic) bool { return true })
}
