import { render } from "preact";
import { Page } from "./app";
import { Cluster } from "./cluster";
import "./style.css";

const cluster = new Cluster();
cluster.start();
render(<Page cluster={cluster} />, document.getElementById("app")!);
