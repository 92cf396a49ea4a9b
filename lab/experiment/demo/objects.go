package demo

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/test/testbed/topology"
	"spillway.dev/spillway/test/testbed/workload"
)

// objects holds the manifests' objects that the demo itself needs. The agents read the
// files on their own.
type objects struct {
	services []*corev1.Service
	slices   []*discoveryv1.EndpointSlice
}

// readObjects decodes the manifests of a directory.
func readObjects(files fs.FS) (*objects, error) {
	names, err := fs.Glob(files, "*.yaml")
	if err != nil || len(names) == 0 {
		return nil, errors.New("read manifests: no *.yaml found: give --manifests a directory that has some")
	}
	o := &objects{}
	for _, name := range names {
		text, err := fs.ReadFile(files, name)
		if err != nil {
			return nil, fmt.Errorf("read manifests: %w", err)
		}
		for i, doc := range bytes.Split(text, []byte("\n---\n")) {
			if err := o.add(doc); err != nil {
				return nil, fmt.Errorf("read manifests: %s, document %d: %w", name, i+1, err)
			}
		}
	}
	return o, nil
}

func (o *objects) add(doc []byte) error {
	var kind metav1.TypeMeta
	if err := yaml.Unmarshal(doc, &kind); err != nil {
		return err
	}
	switch kind.Kind {
	case "Service":
		s := &corev1.Service{}
		o.services = append(o.services, s)
		return yaml.UnmarshalStrict(doc, s)
	case "EndpointSlice":
		s := &discoveryv1.EndpointSlice{}
		o.slices = append(o.slices, s)
		return yaml.UnmarshalStrict(doc, s)
	case "Node":
		return yaml.UnmarshalStrict(doc, &corev1.Node{})
	}
	return fmt.Errorf("kind %q is not one that the demo serves", kind.Kind)
}

// service finds a Service by its name.
func (o *objects) service(name string) (*corev1.Service, error) {
	for _, s := range o.services {
		if s.Name == name {
			return s, nil
		}
	}
	return nil, fmt.Errorf("find Service %s: the manifests have none", name)
}

// server is one server to start in a pod.
type server struct {
	host *topology.Host
	kind string
	port uint16
}

// servers returns the servers of each pod, and checks that the addresses in the slices
// are those of the cluster's pods.
func (o *objects) servers(c *topology.Cluster) ([]server, error) {
	var out []server
	seen := map[server]bool{}
	for _, s := range o.slices {
		for _, e := range s.Endpoints {
			if e.TargetRef == nil || len(e.Addresses) == 0 {
				return nil, fmt.Errorf("check slice %s: an endpoint has no targetRef or no address", s.Name)
			}
			host, err := c.Find(e.TargetRef.Name)
			if err != nil {
				return nil, fmt.Errorf("check slice %s: %w", s.Name, err)
			}
			addr, err := netip.ParseAddr(e.Addresses[0])
			if err != nil || host.Addr(addr) != addr {
				return nil, fmt.Errorf("check slice %s: %s is not an address of %s", s.Name, e.Addresses[0], host.Name)
			}
			for _, p := range s.Ports {
				v := server{host, kindOf(*p.Protocol), uint16(*p.Port)}
				if !seen[v] {
					seen[v] = true
					out = append(out, v)
				}
			}
		}
	}
	return out, nil
}

// kindOf is the kind of server behind a port of a protocol.
func kindOf(p corev1.Protocol) string {
	if p == corev1.ProtocolUDP {
		return workload.UDP
	}
	return workload.HTTP
}

// writeManifests writes the files into the agents' directory.
func writeManifests(r *harness.Harness, files fs.FS) (string, error) {
	names, err := fs.Glob(files, "*.yaml")
	if err != nil {
		return "", err
	}
	for _, name := range names {
		text, err := fs.ReadFile(files, name)
		if err != nil {
			return "", fmt.Errorf("read manifests: %w", err)
		}
		if _, err := r.WriteFile("manifests/"+name, text); err != nil {
			return "", err
		}
	}
	return r.Path("manifests"), nil
}
