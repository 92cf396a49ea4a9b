package intent

import (
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/facts/model"
)

func TestHelpers(t *testing.T) {
	udp := func(port uint16, app string) model.ServicePort {
		return model.ServicePort{Name: "u", Protocol: model.UDP, Port: port, AppProtocol: app}
	}
	tcp := func(port uint16, app string) model.ServicePort {
		return model.ServicePort{Name: "t", Protocol: model.TCP, Port: port, AppProtocol: app}
	}
	for _, c := range []struct {
		name       string
		annotation string
		ports      []model.ServicePort
		want       []Helper
		problem    string // begins so; "" for none
	}{
		{"UDP 69 and TCP 21 are helped by default", "", []model.ServicePort{udp(69, ""), tcp(21, "")}, []Helper{TFTP, FTP}, ""},
		{"the other protocol's are not", "", []model.ServicePort{udp(21, ""), tcp(69, "")}, []Helper{NoHelper, NoHelper}, ""},
		{"appProtocol names it on any port", "", []model.ServicePort{udp(1069, "tftp"), tcp(2121, "FTP")}, []Helper{TFTP, FTP}, ""},
		{"appProtocol names something else", "", []model.ServicePort{udp(69, "dns"), tcp(21, "http")}, []Helper{NoHelper, NoHelper}, ""},
		{"appProtocol of the wrong protocol", "", []model.ServicePort{tcp(69, "tftp")}, []Helper{NoHelper},
			"spec.ports[0].appProtocol: tftp is spoken over UDP"},
		{"none takes it away", "none", []model.ServicePort{udp(69, ""), tcp(21, "ftp")}, []Helper{NoHelper, NoHelper}, ""},
		{"tftp means every UDP port and no TCP port", "tftp", []model.ServicePort{udp(4000, "dns"), udp(69, ""), tcp(21, "")},
			[]Helper{TFTP, TFTP, NoHelper}, ""},
		{"ftp means every TCP port", " ftp ", []model.ServicePort{udp(69, ""), tcp(8021, "")}, []Helper{NoHelper, FTP}, ""},
		{"no port that could have it", "ftp", []model.ServicePort{udp(69, "")}, []Helper{NoHelper},
			"metadata.annotations[spillway.dev/helper]: ftp needs a TCP port"},
		{"a bad value is one problem and changes nothing", "irc", []model.ServicePort{udp(69, ""), tcp(21, "")}, []Helper{TFTP, FTP},
			`metadata.annotations[spillway.dev/helper]: "irc" is not a helper`},
	} {
		t.Run(c.name, func(t *testing.T) {
			svc := web(ports(c.ports...), clusterIPs("10.96.0.1", "fd00::1"))
			if c.annotation != "" {
				svc.Annotations = map[string]string{HelperAnnotation: c.annotation}
			}
			p := planOf(svc)
			var problems []string
			for _, pr := range p.problems {
				problems = append(problems, pr.Field+": "+pr.What)
			}
			if c.problem == "" && len(problems) > 0 || c.problem != "" && (len(problems) != 1 || !strings.HasPrefix(problems[0], c.problem)) {
				t.Errorf("problems %q, want one that begins %q", problems, c.problem)
			}
			for i, spec := range c.ports {
				n := 0
				for _, planned := range p.ports {
					if planned.id.Port == spec.Name && planned.id.Number == spec.Port && planned.id.Protocol == spec.Protocol {
						n++
						if want := spec.Protocol == model.TCP && slices.Contains(c.want, FTP); planned.ofFTP != want {
							t.Errorf("port %d/%s is of a Service that speaks FTP: %v, want %v", spec.Port, spec.Protocol, planned.ofFTP, want)
						}
						if planned.helper != c.want[i] {
							t.Errorf("port %d/%s of %s: %v, want %v", spec.Port, spec.Protocol, planned.id.Family, planned.helper, c.want[i])
						}
					}
				}
				if n != 2 {
					t.Errorf("port %d is planned in %d families, want 2", spec.Port, n)
				}
			}
		})
	}
}
