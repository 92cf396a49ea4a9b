package doctor

import (
	"strings"

	"spillway.dev/spillway/internal/facts/model"
)

// Object is what a finding is about. It does not change while the finding lasts: it has no counts.
type Object struct {
	Kind      string `json:"kind"` // Service, Pod (its host ports), DoNotTrackPolicy, or Node
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`     // of a Node: what the finding names there, such as a destination
	Port      string `json:"port,omitempty"`     // of the Service, its name or number
	Endpoint  string `json:"endpoint,omitempty"` // address:port
}

// serviceObject returns the Object of a Service port that is written as namespace/name:port, and of
// an endpoint of it; "": of all.
func serviceObject(service, endpoint string) Object {
	name, port, _ := strings.Cut(service, ":")
	namespace, name, _ := strings.Cut(name, "/")
	o := Object{Kind: model.KindService, Namespace: namespace, Name: name, Port: port, Endpoint: endpoint}
	if pod, is := model.PodOf(model.Name{Namespace: namespace, Name: name}); is {
		o.Kind, o.Name = model.KindPod, pod.Name
	}
	return o
}

// nodeObject returns the Object of a thing that the node has several of.
func nodeObject(name string) Object { return Object{Kind: model.KindNode, Name: name} }

// Service returns the name that the agent serves the object by, and whether it serves it.
func (o Object) Service() (name model.Name, is bool) {
	name = model.Name{Namespace: o.Namespace, Name: o.Name}
	if o.Kind == model.KindPod {
		name = model.HostPortsOf(name)
	}
	return name, o.Kind == model.KindService || o.Kind == model.KindPod
}

// String names the object in a few words.
func (o Object) String() string {
	text := o.Kind
	switch {
	case o.Namespace != "":
		text += " " + o.Namespace + "/" + o.Name
	case o.Name != "":
		text += " " + o.Name
	}
	if o.Port != "" {
		text += ":" + o.Port
	}
	if o.Endpoint != "" {
		text += ", endpoint " + o.Endpoint
	}
	return text
}
