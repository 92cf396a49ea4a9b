package upgrade

import (
	"unsafe"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/facts/model"
)

// Version 3 added the time when a flow was opened. The size of struct flow stays:
// the fields for TFTP share their memory with those for TCP.

// FlowV2 is struct flow of version 2. Head has the fields that are the same in both
// versions. Their places, that of Slot and the size must stay the same, because transfer
// reads either version as a TCFlow (asFlow).
type FlowV2 struct {
	Head                [unsafe.Offsetof(objects.TCFlow{}.Tcp)]byte
	Tcp                 objects.TCTcpSide
	Backend             uint32
	Service             uint32
	Slot                uint32
	HelperPort, Answers uint16
}

// FlowFromV2 returns a flow without the time when it was opened.
func FlowFromV2(k objects.TCTuple, old FlowV2) (objects.TCTuple, objects.TCFlow, bool) {
	f := objects.TCFlow{Backend: old.Backend, Service: old.Service, Slot: old.Slot}
	copy(objects.Bytes(&f), old.Head[:])
	if model.Protocol(k.Proto) == model.TCP {
		f.Tcp = old.Tcp
	} else {
		*objects.UDPOf(&f) = objects.FlowUDP{HelperPort: old.HelperPort, Answers: old.Answers}
	}
	return k, f, true
}

// FlowToV2 is the inverse of FlowFromV2.
func FlowToV2(k objects.TCTuple, f objects.TCFlow) (objects.TCTuple, FlowV2, bool) {
	old := FlowV2{Backend: f.Backend, Service: f.Service, Slot: f.Slot}
	copy(old.Head[:], objects.Bytes(&f))
	if model.Protocol(k.Proto) == model.TCP {
		old.Tcp = f.Tcp
	} else {
		old.HelperPort, old.Answers = objects.UDPOf(&f).HelperPort, objects.UDPOf(&f).Answers
	}
	return k, old, true
}
