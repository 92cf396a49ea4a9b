package model

import "cmp"

// Kinds of the objects that code tells apart in an ObjectRef.
const (
	KindService          = "Service"
	KindNode             = "Node"
	KindPod              = "Pod"
	KindNetworkPolicy    = "NetworkPolicy"
	KindDoNotTrackPolicy = "DoNotTrackPolicy"
)

// ObjectRef names a Kubernetes object; the zero ObjectRef names none.
type ObjectRef struct {
	Kind string
	Name Name // without a namespace for a cluster-scoped kind
}

// Problem describes an error in an input object, in the connection to the API server
// or in a dataplane. Reconcile reports a Problem once when it appears, once when it is
// resolved, and each hour in between. Object, Where and Field identify it. What is for
// people only, and may change while the Problem lasts.
type Problem struct {
	Object ObjectRef // the object that the Problem affects, if it affects one
	Where  string    // "file.yaml, document 2", "Service ns/name" or "EndpointSlice ns/name"
	Field  string    // "spec.clusterIPs[0]", "" if the whole object
	What   string    // the error, and its remedy
	// Version identifies the text that a person has written: the content of a manifest, or
	// the spec of a policy. With a new Version, another What is another error. "": What
	// changes by itself.
	Version string
}

// ServiceProblem returns a Problem about a Service, or about the host ports of a Pod.
func ServiceProblem(service Name, field, what string) Problem {
	where := KindService + " " + service.String()
	if pod, is := PodOf(service); is {
		where = KindPod + " " + pod.String()
	}
	return Problem{Object: ObjectRef{KindService, service}, Where: where, Field: field, What: what}
}

// ClusterProblem returns a Problem about an object without a namespace.
func ClusterProblem(kind, name, field, what string) Problem {
	return Problem{
		Object: ObjectRef{kind, Name{Name: name}},
		Where:  kind + " " + name, Field: field, What: what,
	}
}

// Service returns the name of the Service that the Problem affects, and whether it affects
// one. Where may be a document that defines the Service, or one of its EndpointSlices. The
// host ports of a Pod have the name of HostPortsOf.
func (p Problem) Service() (Name, bool) {
	return p.Object.Name, p.Object.Kind == KindService
}

// Compare orders Problems by Where, Field and What.
func (p Problem) Compare(o Problem) int {
	return cmp.Or(cmp.Compare(p.Where, o.Where), cmp.Compare(p.Field, o.Field), cmp.Compare(p.What, o.What))
}

// String returns the Problem as one line.
func (p Problem) String() string {
	if p.Field == "" {
		return p.Where + ": " + p.What
	}
	return p.Where + ": " + p.Field + ": " + p.What
}

// UnreadReason tells why a source could not read something.
type UnreadReason int

// The reasons why a source could not read something.
const (
	// UnreadNothing: the source read everything.
	UnreadNothing UnreadReason = iota
	// UnreadFile: a manifest could never be read as a whole. It may define any object.
	UnreadFile
	// UnreadPolicy: a DoNotTrackPolicy is not valid, and no earlier version is known.
	UnreadPolicy
	// UnreadPolicies: the API server forbids reading DoNotTrackPolicies.
	UnreadPolicies
)

// Unread is what a source could not read although do-not-track policies may depend on
// it. What an earlier agent knew about it is not known.
type Unread struct {
	Reason UnreadReason
	Text   string // for messages: "m.yaml", "DoNotTrackPolicy cache"
}

// Any reports whether the source could not read something.
func (u Unread) Any() bool { return u.Reason != UnreadNothing }

// OnlyPolicies reports whether nothing but DoNotTrackPolicies is missing, so that the
// facts that other policies depend on are complete.
func (u Unread) OnlyPolicies() bool {
	return u.Reason == UnreadPolicy || u.Reason == UnreadPolicies
}
