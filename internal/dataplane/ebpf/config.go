package ebpf

import "spillway.dev/spillway/internal/dataplane/ebpf/objects"

// The configuration, whose types and values are those of package objects.
type (
	// Config configures the dataplane.
	Config = objects.Config
	// DSRKey is a key of SipHash.
	DSRKey = objects.DSRKey
	// Timeouts are the idle times after which a flow is deleted.
	Timeouts = objects.Timeouts
)

// Values of Config, and its defaults.
const (
	BypassAuto   = objects.BypassAuto
	BypassAlways = objects.BypassAlways
	BypassNever  = objects.BypassNever

	EventsOff      = objects.EventsOff
	EventsRefused  = objects.EventsRefused
	EventsOnDemand = objects.EventsOnDemand
	EventsAll      = objects.EventsAll
	MaxEventsRate  = objects.MaxEventsRate

	HooksAll  = objects.HooksAll
	HooksHost = objects.HooksHost
	HooksOff  = objects.HooksOff

	XDPOff     = objects.XDPOff
	XDPAuto    = objects.XDPAuto
	XDPGeneric = objects.XDPGeneric

	DefaultFlowTableSize = objects.DefaultFlowTableSize
	DefaultDSRPort       = objects.DefaultDSRPort
	FlowMemory           = objects.FlowMemory
	MaxFlowTableSize     = objects.MaxFlowTableSize
)

// Lists of values of Config, and its defaults.
var (
	SocketHooks     = objects.SocketHooks
	XDPModes        = objects.XDPModes
	DefaultTimeouts = objects.DefaultTimeouts
)
