package intent

import (
	"fmt"
	"strings"

	"spillway.dev/spillway/internal/facts/model"
)

// Helper names a protocol whose server answers, or is asked, on a second port
// that only the first packets name.
type Helper uint8

// The protocols that need help.
const (
	NoHelper Helper = iota
	TFTP            // RFC 1350: the server answers from a port of its own choice
	FTP             // RFC 959: either side names a data port inside the control connection
)

// HelperAnnotation chooses the helper of a Service's ports: none, tftp or ftp.
const HelperAnnotation = "spillway.dev/helper"

// helperNames are what users write; TFTP's and FTP's are those of IANA, as
// appProtocol has them.
var helperNames = []string{NoHelper: "none", TFTP: "tftp", FTP: "ftp"}

// String is the annotation's value.
func (h Helper) String() string { return helperNames[h] }

// protocol is the only one that a helper understands.
func (h Helper) protocol() model.Protocol {
	if h == TFTP {
		return model.UDP
	}
	return model.TCP
}

// wellKnown is the helper of a port that says nothing of what it speaks.
func wellKnown(p *model.ServicePort) Helper {
	switch {
	case p.Protocol == model.UDP && p.Port == 69:
		return TFTP
	case p.Protocol == model.TCP && p.Port == 21:
		return FTP
	}
	return NoHelper
}

// helperNamed finds a helper by its name.
func helperNamed(text string) (Helper, bool) {
	for h, n := range helperNames {
		if strings.EqualFold(text, n) {
			return Helper(h), true
		}
	}
	return NoHelper, false
}

// HelperOf says which helper each port of a Service has; see HelperAnnotation.
func HelperOf(svc *model.Service) []Helper { return helpersOf(svc, func(string, string) {}) }

// helpersOf says which helper each port of a Service has: what the annotation
// says, else its appProtocol, else IANA's list of ports.
func helpersOf(svc *model.Service, complain func(field, what string)) []Helper {
	out := make([]Helper, len(svc.Ports))
	value, set := svc.Annotations[HelperAnnotation]
	field := fmt.Sprintf("metadata.annotations[%s]", HelperAnnotation)
	if set {
		asked, known := helperNamed(strings.TrimSpace(value))
		if known {
			fits := asked == NoHelper
			for i := range svc.Ports {
				if asked != NoHelper && svc.Ports[i].Protocol == asked.protocol() {
					out[i], fits = asked, true
				}
			}
			if !fits {
				complain(field, fmt.Sprintf("%s needs a %s port, and the Service has none; add one or remove the annotation", asked, asked.protocol()))
			}
			return out
		}
		complain(field, fmt.Sprintf("%q is not a helper and is left out; use none, tftp or ftp", value))
	}
	for i := range svc.Ports {
		p := &svc.Ports[i]
		if p.AppProtocol == "" {
			out[i] = wellKnown(p)
			continue
		}
		h, known := helperNamed(p.AppProtocol)
		if !known || h == NoHelper {
			continue // it says that it speaks something else
		}
		if p.Protocol != h.protocol() {
			complain(fmt.Sprintf("spec.ports[%d].appProtocol", i), fmt.Sprintf("%s is spoken over %s, and the port is %s; mend one of the two", h, h.protocol(), p.Protocol))
			continue
		}
		out[i] = h
	}
	return out
}

// PortRange is a range of ports, both ends included.
type PortRange struct{ First, Last uint16 }

// An announcement of FTP's (PORT, EPRT, PASV, EPSV) opens a way to the announced port at
// an address that others use, too. So that nobody takes what is others', no connection is
// led after it to these ports, nor to an address and port that a Service has, nor to one
// that the node listens on as far as the dataplane can tell. Such a connection gets to
// where it would have got without the announcement.
var (
	// NeverExpected are ports that no announcement may take, whatever their address.
	NeverExpected = PortRange{1, 1023}
	// KeptByNodes are ports that none may take at an address of the node: those of
	// Kubernetes' own programs, which even a process of the node is not led away from.
	KeptByNodes = []PortRange{
		{2379, 2380},   // etcd
		{6443, 6443},   // the API server
		{10248, 10259}, // kubelet, kube-proxy or Spillway, controller manager, scheduler
	}
)
