package ebpf

import (
	"unsafe"

	"spillway.dev/spillway/internal/facts/model"
)

// Version 3 added the time when a flow was opened. The size of struct flow stays:
// the fields for TFTP share their memory with those for TCP.

// flowV2 is struct flow of version 2. Head has the fields that are the same in both
// versions. Their places, that of Slot and the size must stay the same, because transfer
// reads either version as a tcFlow (asFlow).
type flowV2 struct {
	Head                [unsafe.Offsetof(tcFlow{}.Tcp)]byte
	Tcp                 tcTcpSide
	Backend             uint32
	Service             uint32
	Slot                uint32
	HelperPort, Answers uint16
}

// udpSide is the member for UDP of the union of struct flow. bpf2go generates the first
// member alone, which is Tcp.
type udpSide struct {
	HelperPort, Answers uint16
	Checked             uint32
}

func (f *tcFlow) udp() *udpSide { return (*udpSide)(unsafe.Pointer(&f.Tcp)) }

// flowFromV2 returns a flow without the time when it was opened.
func flowFromV2(k tcTuple, old flowV2) (tcTuple, tcFlow, bool) {
	f := tcFlow{Backend: old.Backend, Service: old.Service, Slot: old.Slot}
	copy(memory(&f), old.Head[:])
	if model.Protocol(k.Proto) == model.TCP {
		f.Tcp = old.Tcp
	} else {
		*f.udp() = udpSide{HelperPort: old.HelperPort, Answers: old.Answers}
	}
	return k, f, true
}

// flowToV2 is the inverse of flowFromV2.
func flowToV2(k tcTuple, f tcFlow) (tcTuple, flowV2, bool) {
	old := flowV2{Backend: f.Backend, Service: f.Service, Slot: f.Slot}
	copy(old.Head[:], memory(&f))
	if model.Protocol(k.Proto) == model.TCP {
		old.Tcp = f.Tcp
	} else {
		old.HelperPort, old.Answers = f.udp().HelperPort, f.udp().Answers
	}
	return k, old, true
}
