package intent

import (
	"fmt"
	"strings"

	"spillway.dev/spillway/internal/facts/model"
)

// Helper is a protocol that uses a second port, which only its first packets name.
type Helper uint8

// The protocols that need a helper.
const (
	NoHelper Helper = iota
	TFTP            // RFC 1350: the server answers from a port of its own choice
	FTP             // RFC 959: either side names a data port inside the control connection
)

// HelperAnnotation chooses the helper of a Service's ports: none, tftp or ftp.
const HelperAnnotation = "spillway.dev/helper"

// helperNames are the values of the annotation. TFTP's and FTP's are IANA's names, as in
// appProtocol.
var helperNames = []string{NoHelper: "none", TFTP: "tftp", FTP: "ftp"}

// String is the annotation's value.
func (h Helper) String() string { return helperNames[h] }

// protocol returns the transport protocol of a helper.
func (h Helper) protocol() model.Protocol {
	if h == TFTP {
		return model.UDP
	}
	return model.TCP
}

// wellKnown returns the helper of a port without appProtocol, by its number.
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

// HelperOf returns the helper of each port of a Service; see HelperAnnotation.
func HelperOf(svc *model.Service) []Helper { return helpersOf(svc, func(string, string) {}) }

// helpersOf returns the helper of each port of a Service: by the annotation, else by its
// appProtocol, else by IANA's list of ports.
func helpersOf(svc *model.Service, complain func(field, what string)) []Helper {
	out := make([]Helper, len(svc.Ports))
	value, set := svc.Annotations[HelperAnnotation]
	field := annotationField(HelperAnnotation)
	if set {
		h, known := helperNamed(strings.TrimSpace(value))
		if known {
			fits := h == NoHelper
			for i := range svc.Ports {
				if h != NoHelper && svc.Ports[i].Protocol == h.protocol() {
					out[i], fits = h, true
				}
			}
			if !fits {
				complain(field, fmt.Sprintf("%s needs a %s port, and the Service has none; add one or remove the annotation", h, h.protocol()))
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
			continue // appProtocol names another protocol
		}
		if p.Protocol != h.protocol() {
			complain(fmt.Sprintf("spec.ports[%d].appProtocol", i),
				fmt.Sprintf("%s is spoken over %s, and the port is %s: change one of the two", h, h.protocol(), p.Protocol))
			continue
		}
		out[i] = h
	}
	return out
}

// PortRange is a range of ports, both ends included.
type PortRange struct{ First, Last uint16 }

// An FTP expectation (PORT, EPRT, PASV, EPSV) allows connections to the named port at an
// address that others use, too. To protect those, the dataplane redirects no expected
// connection to these ports, to an address and port of a Service, or to a port that the
// node listens on, as far as the dataplane knows. Such a connection takes its normal
// route.
var (
	// NeverExpected are ports that no expectation may use, at any address.
	NeverExpected = PortRange{1, 1023}
	// KeptByNodes are ports that no expectation may use at an address of the node: those
	// of Kubernetes' own programs.
	KeptByNodes = []PortRange{
		{2379, 2380},   // etcd
		{6443, 6443},   // the API server
		{10248, 10259}, // kubelet, kube-proxy or Spillway, controller manager, scheduler
	}
)
