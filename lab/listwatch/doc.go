// Package listwatch serves Kubernetes objects to programs that only list and watch,
// such as kube-proxy and Spillway's agent. It takes the place of an API server and of
// etcd where the objects are known beforehand and the lab itself changes them:
//
//	s, err := listwatch.New(nodes, services, slices)
//	go http.Serve(listener, s)
//	err = s.Apply(changedSlice)
//
// It serves every kind of client-go's scheme, in JSON and protobuf:
//
//   - list, with label and field selectors, always complete (a limit is a maximum that a
//     server may ignore)
//   - watch from any version that it gave, with bookmarks and initial events
//   - get
//   - create of Events, which it accepts and drops
//
// Everything else is refused with the Status that kube-apiserver answers. Objects are
// served as they were given: nothing is defaulted, checked or authorized. All changes are
// kept in memory, for as long as a row of an experiment lasts.
package listwatch
